"""Prepare a run's tokenizer and tokenised data before any rank starts, so that no rank waits in a collective."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from kumi.config import ResolvedRun, document_lengths
from kumi.config.model_source import local_folder
from kumi.config.run_length import run_mixture
from kumi.data import (
    TOKENIZER,
    TOKENS,
    Source,
    Store,
    Tokenizer,
    expand,
    load_tokenizer,
    open_store,
    preparation,
    prepare,
    would_read,
)
from kumi.data.bpe import train as train_tokenizer
from kumi.data.gym_source import check_scored
from kumi.data.prompt_rows import PromptRows
from kumi.data.remote_sources import covers
from kumi.errors import ConfigError
from kumi.process_limits import usable_cores
from kumi.remote.addresses import is_url, join_url
from kumi.rewards.reward_spec import GymReward
from kumi.spec.data_source import ChatOptions, is_gym
from kumi.train.dataset_commits import run_sources


def data_folder(run: ResolvedRun) -> Path:
    """Return the folder of the run's tokenizer and tokenised data."""
    folder = document_lengths.data_folder(run.config)
    assert folder is not None, "a run has data"
    return folder


def check_data(run: ResolvedRun) -> None:
    """Raise ConfigError unless the data sources exist and the tokenizer fits the model. Write nothing."""
    is_scored = any(section.kind == GymReward.kind for section in run.config.rewards)
    for source in run_sources(run):
        _refuse_own_files(run, source)
        if is_scored and is_gym(source.path):
            check_scored(source.path)
        expand(source)
    if isinstance(run.config.data.tokenizer, str):
        _check_vocabulary(run, load_tokenizer(tokenizer_folder(run)))
    elif run.config.data.tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer.vocab_size={run.config.data.tokenizer.vocab_size} is larger than the model's "
            f"vocab_size={run.model.vocab_size}; use at most {run.model.vocab_size}"
        )


def _refuse_own_files(run: ResolvedRun, source: Source) -> None:
    """Raise ConfigError if `source` would read files that the run writes, which would change the data at each
    launch."""
    out = run.config.train.out
    if is_url(out) and is_url(source.path) and covers(source.path, join_url(out, "metrics.jsonl")):
        raise ConfigError(
            f"train.out: {out} lies inside data source {source.path!r}, which would read files that the run writes; "
            f"name a URL outside of the source"
        )
    data = data_folder(run)
    for key, folder, names in (
        ("train.out", run.out, ("config.toml", "metrics.jsonl", "hf/README.md")),
        ("data.cache", data, (f"{TOKENS}/faults.jsonl", f"{TOKENS}/meta.json", f"{TOKENIZER}/tokenizer.json")),
    ):
        own_file = next((folder / name for name in names if would_read(source, (folder / name).absolute())), None)
        if own_file is not None:
            raise ConfigError(
                f"{key}: {folder} lies inside data source {source.path!r}, which would read files that the run writes "
                f"({own_file}); name a folder outside of it, or add {f'{folder.name}/**'!r} to the source's exclude"
            )


def prepare_data(run: ResolvedRun) -> Store:
    """Return the tokenised data of `run`, after preparing it and the plans of its packed rows if they do not exist
    yet."""
    data = run.config.data
    store = prepare(
        run_sources(run),
        _tokenizer(run),
        data_folder(run) / TOKENS,
        validation=data.validation,
        on_error=data.on_error,
        workers=_worker_count(run),
        progress=True,
        add_bos=data.add_bos,
        chat=chat_options(run),
        exclude_rows=data.exclude_rows,
    )
    _pack_examples(run, store)
    return store


def _pack_examples(run: ResolvedRun, store: Store) -> None:
    """Store the plans of the run's packed rows, and print how full the rows are and the examples that are left out."""
    for name, rows in store.pack(run.batch.seq_len, run.config.train.seed, run.config.objective.rows).items():
        left_out = [
            f"{count} {reason} left out"
            for count, reason in ((rows.bins.too_long, "longer than a row"), (rows.bins.empty, "of a single token"))
            if count
        ]
        sentence = f"{name}: {rows.units} examples in {rows.rows} rows, {rows.filled:.1%} filled"
        print(f"packing    {'; '.join([sentence, *left_out])}", flush=True)
    if run.config.rollout is not None:
        for name, source in zip(store.train_names, run_mixture(run.config, store).sources, strict=True):
            assert isinstance(source, PromptRows), "Store.pack checks the kinds of the rows"
            too_long = f"; {source.too_long} longer than {source.seq_len} tokens left out" if source.too_long else ""
            print(f"prompts    {name}: {source.rows} prompts{too_long}", flush=True)


def stock_texts(run: ResolvedRun, digests: Collection[str]) -> dict[str, list[str]]:
    """Return by digest the whole conversations of the rows with these `digests`, each rendered by the chat template."""
    return preparation.stock_texts(run_sources(run), _tokenizer(run), digests, chat_options(run))


def check_rows(run: ResolvedRun, near: bool, against: Sequence[str], write: str | None) -> dict[str, Any]:
    """Return the duplicates among the rows of the run's sources, as `kumi.data.hygiene.check_sources` does."""
    from kumi.data.hygiene import check_sources

    target = None if write is None else Path(write)
    return check_sources(run_sources(run), near=near, against=[Path(file) for file in against], write=target)


def open_data(run: ResolvedRun) -> Store:
    """Open the existing tokenised data of `run`. Raise ConfigError if there are none."""
    return open_store(data_folder(run) / TOKENS)


def tokenizer_folder(run: ResolvedRun) -> Path:
    """Return the folder of the run's tokenizer: the given one, or the one that is trained for the run."""
    tokenizer = run.config.data.tokenizer
    if "data.tokenizer" in run.snapshots:
        return run.snapshots["data.tokenizer"].folder
    return local_folder(tokenizer) if isinstance(tokenizer, str) else data_folder(run) / TOKENIZER


def chat_options(run: ResolvedRun) -> ChatOptions:
    """Return how the run renders conversations: its section [data.chat]."""
    return ChatOptions(**run.config.data.chat.model_dump())


def _tokenizer(run: ResolvedRun) -> Tokenizer:
    """Return the run's tokenizer. Train it first if the run file asks for a new one. Raise ConfigError if it does not
    fit the model."""
    section = run.config.data.tokenizer
    if isinstance(section, str):
        tokenizer = load_tokenizer(tokenizer_folder(run))
    else:
        tokenizer = train_tokenizer(
            run_sources(run),
            section.vocab_size,
            tokenizer_folder(run),
            validation=run.config.data.validation,
            exclude_rows=run.config.data.exclude_rows,
        )
    _check_vocabulary(run, tokenizer)
    return tokenizer


def _check_vocabulary(run: ResolvedRun, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if `tokenizer` has more entries than the model's vocabulary."""
    if tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer: {tokenizer.folder} has {tokenizer.vocab_size} entries, but the model's vocab_size "
            f"is {run.model.vocab_size}; use the model's own tokenizer, or a model with a vocab_size of at least "
            f"{tokenizer.vocab_size}"
        )


def _worker_count(run: ResolvedRun) -> int:
    return run.config.data.workers or usable_cores()
