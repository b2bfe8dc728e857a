"""Prepare a store of token files from sources: plan units, tokenize them in parallel, merge them in order.

A unit is a part of a source's files that one worker tokenizes in one job (see `kumi.data.shards`).

    expand the sources and split them into units -> tokenize units that are not in the cache, in worker processes
      -> merge units per source and side (train, validation) -> write meta.json last

The cache (`<out>/cache`) has one folder per finished unit, named by a digest of its input. A killed run leaves the
cache, the next run continues from it, and a finished run removes it. The merge therefore needs disk space for the
tokens twice."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kumi.data import pool, records, shards, store, store_meta
from kumi.data.merge_shards import merge_shards
from kumi.data.refused_rows import RefusedRows, check_stored_rows
from kumi.data.row_guard import StoppedError
from kumi.data.row_list import read_row_list
from kumi.data.shards import SIDES, Plan, Unit
from kumi.data.sources import DataPathError
from kumi.data.store import Store
from kumi.data.tokenizer import ORIGIN, Tokenizer
from kumi.data.verify_store import verify
from kumi.errors import ConfigError, DataError, KumiError, RefusedError
from kumi.files.output import make_folder, open_append, remove_tree
from kumi.files.untrusted import json_record
from kumi.process_limits import usable_cores
from kumi.progress import show_progress
from kumi.spec.data_source import ChatOptions, Source
from kumi.units import format_count

# The file that marks a folder as prepared by kumi, and that a preparation locks.
OWNER = ".kumi-data"
_CACHE = "cache"  # units that are tokenized, until all are merged
# Folders inside a run's folder of data.
TOKENS, TOKENIZER = "tokens", "tokenizer"


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    out: Path | str,
    *,
    validation: float = 0.0,
    on_error: str = "skip",
    workers: int = 0,
    progress: bool = False,
    add_bos: bool = False,
    chat: ChatOptions = ChatOptions(),  # noqa: B008
    exclude_rows: Path | str | None = None,
) -> Store:
    """Return the store of `sources` in folder `out`; prepare the store first unless it exists for the same input.

    Every document gets an eos token; rows that are examples get the tokens of their chat template (options: `chat`).
    `validation` is the fraction of documents held out, chosen by a hash of the text. `exclude_rows` is a list of rows
    that are left out (see `kumi.data.row_list`).
    `workers=0` uses all cores available to this process. With `on_error="fail"` the first unreadable record raises
    DataError with file:line; with "skip" it is counted and listed in faults.jsonl. Raise ConfigError for wrong options
    or unusable sources, RefusedError when `out` has other files, DataError when more than the fraction
    `chat.max_refused` of the rows of a source of examples is refused."""
    _check_options(sources, tokenizer, validation, on_error, add_bos)
    folder = Path(out)
    exclude = None if exclude_rows is None else read_row_list(exclude_rows)
    plan = shards.plan(sources, tokenizer, validation, add_bos, chat, exclude)
    with _locked_folder(folder):
        if not _is_prepared(folder, plan):
            _print_columns(plan)
            run = _Run(tokenizer, on_error, workers or usable_cores(), progress, chat.max_refused)
            _build_store(folder, plan, run)
        elif verify(folder):
            print(
                f"{folder}: verified by its digests; added checksums of its blocks to {store_meta.META}",
                file=sys.stderr,
            )
        remove_tree(folder / _CACHE)  # of this preparation, or the rest that a killed process left
        _store_weights(folder, plan)
        if on_error == "fail":
            _refuse_faults(folder)
        check_stored_rows(folder, chat.max_refused)
        return store.open_store(folder)


def _check_options(
    sources: Sequence[Source], tokenizer: Tokenizer, validation: float, on_error: str, add_bos: bool
) -> None:
    """Raise ConfigError for options that a preparation does not support."""
    if not sources:
        raise DataPathError("no data source is given; name at least one path")
    if not 0 <= validation <= 0.5:
        raise ConfigError(f"validation={validation}: the fraction of documents held out must be between 0 and 0.5")
    if on_error not in ("skip", "fail"):
        raise ConfigError(f"on_error={on_error!r} must be 'skip' or 'fail'")
    if add_bos and tokenizer.bos_id is None:
        raise ConfigError(
            f"{tokenizer.folder}: add_bos is set, but neither tokenizer_config.json nor special_tokens_map.json names "
            "a bos_token (a bos_token_id of config.json does not count, as in transformers); leave add_bos out, or add "
            "bos_token to tokenizer_config.json"
        )


def foreign_files(folder: Path) -> list[str]:
    """Return the names in `folder`, a run's `data` folder, that kumi did not create.

    kumi's folders of tokens and of the tokenizer get a marker file first, so leftovers of a killed process are
    recognised as well.
    """
    markers = {TOKENS: OWNER, TOKENIZER: ORIGIN}
    return [item.name for item in folder.iterdir() if not _is_marked(item, markers.get(item.name))]


def _is_marked(folder: Path, marker: str | None) -> bool:
    """Return True for a folder that is empty or has the file `marker`."""
    return marker is not None and folder.is_dir() and ((folder / marker).is_file() or not any(folder.iterdir()))


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Create `folder` and lock it against other preparations; raise RefusedError if it has files not from kumi."""
    if folder.exists() and not folder.is_dir():
        raise RefusedError(f"{folder}: is a file, but prepared data needs a folder; name a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / OWNER).exists():
        raise RefusedError(f"{folder}: has files that kumi did not prepare; name a new or empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    with open_append(folder / OWNER) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: another process is preparing this data; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_prepared(folder: Path, plan: Plan) -> bool:
    """Return True when `folder` has the finished store of `plan`."""
    meta = store_meta.read_meta(folder)
    return (
        meta is not None
        and meta.get("fingerprint") == plan.fingerprint
        and meta.get("blocks", plan.blocks) == plan.blocks
    )


@dataclass(frozen=True)
class _Run:
    """Arguments of a preparation that do not change its result. `show`: whether to show the progress."""

    tokenizer: Tokenizer
    on_error: str
    workers: int
    show: bool
    max_refused: float


def _print_columns(plan: Plan) -> None:
    """Print what each source of examples is read as, and which columns are used and ignored."""
    for source, fmt in zip(plan.sources, plan.formats, strict=True):
        if fmt.kind != "text":
            ignored = f"; ignores {', '.join(fmt.ignored)}" if fmt.ignored else ""
            line = f"source {source.path}: {fmt.kind}; uses {', '.join(fmt.used)}{ignored}"
            print("".join(c if c.isprintable() else repr(c)[1:-1] for c in line), file=sys.stderr, flush=True)


def _build_store(folder: Path, plan: Plan, run: _Run) -> None:
    """Tokenize the units of `plan` and merge them into a store in `folder`."""
    cache = folder / _CACHE
    make_folder(cache)
    try:
        _run_units(cache, plan, run)
        merge_shards(folder, cache, plan, run.tokenizer, run.max_refused)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        reason = "the disk is full" if error.errno == errno.ENOSPC else f"a limit of the system ({error.strerror})"
        raise RefusedError(
            f"{folder}: {reason}; finished units are kept, free some space and run the same command again "
            "(the last step needs space for the tokens twice)"
        ) from error


def _run_units(cache: Path, plan: Plan, run: _Run) -> None:
    """Tokenize the units that are not in `cache`, in worker processes."""
    counts = [shards.read_unit(cache / key) for key in plan.keys]
    missing = [number for number, unit_counts in enumerate(counts) if unit_counts is None]
    jobs = [_job(cache, plan, number, run) for number in missing]
    total = sum(unit.bytes for unit in plan.units)
    done = {number: unit.bytes for number, unit in enumerate(plan.units) if counts[number] is not None}
    tokens: dict[int, int] = {}
    refused = RefusedRows(cache, plan, run.max_refused)
    started = time.monotonic()
    with (
        show_progress("tokenizing", total, enabled=run.show) as update,
        closing(pool.run_jobs(jobs, run.workers)) as answers,
    ):
        for job, answer in answers:
            number = missing[job]
            if "error" in answer:
                _raise_worker_error(answer, plan.units[number])
            if "progress" in answer:
                done[number] = min(answer["progress"], plan.units[number].bytes)
                tokens[number] = answer["tokens"]
            else:
                done[number] = plan.units[number].bytes
                tokens[number] = sum(answer["result"].get(f"{side}_tokens", 0) for side in SIDES)
                counts[number] = answer["result"]
                refused.check(plan.units[number].source, counts)
            update(sum(done.values()), _throughput(sum(tokens.values()), time.monotonic() - started))


def stock_texts(
    sources: Sequence[Source], tokenizer: Tokenizer, digests: Collection[str], chat: ChatOptions
) -> dict[str, list[str]]:
    """Return whole conversations as text, rendered by the chat template as other trainers do, by the digest of the row.

    `digests`: those of the rows to render. There is one text for each side of a row. One worker process reads the files
    until all rows are rendered.
    """
    plan = shards.plan(sources, tokenizer, 0.0, False, chat)
    run = _Run(tokenizer, "skip", 1, False, 1.0)
    texts: dict[str, list[str]] = {}
    for number, unit in enumerate(plan.units):
        missing = sorted(set(digests) - set(texts))
        if not missing or plan.formats[unit.source].kind == "text":
            continue
        job = _job(Path(), plan, number, run) | {"digests": missing}
        with closing(pool.run_jobs([job], 1, "kumi.data.stock_worker")) as answers:
            for _, answer in answers:
                if "error" in answer:
                    raise KumiError(f"the rows cannot be rendered again: {answer['error']}")
                texts |= answer["result"]
    return texts


def _throughput(tokens: int, seconds: float) -> str:
    return f"{format_count(tokens)} tokens | {format_count(tokens / max(seconds, 1e-9))} tok/s"


def _job(cache: Path, plan: Plan, number: int, run: _Run) -> dict[str, Any]:
    """Return the job for unit `number`, as JSON data for a worker."""
    unit = plan.units[number]
    source, fmt = plan.sources[unit.source], plan.formats[unit.source]
    excluded = plan.excluded[number] if plan.excluded else []
    more: dict[str, Any] = {"excluded": excluded} if any(excluded) else {}
    return {
        "tokenizer": str(run.tokenizer.folder.resolve()),
        "digest": run.tokenizer.digest,
        "target": str((cache / plan.keys[number]).resolve()),
        "segments": [asdict(segment) for segment in unit.segments],
        "text_key": source.text_key,
        "validation": shards.validation_fraction(source, unit, plan.options["validation"]),
        "add_bos": plan.options["bos"] is not None,
        "on_error": run.on_error,
        "parent": os.getpid(),
    } | (more if fmt.kind == "text" else {"chat": plan.chat, "format": asdict(fmt), **more})


# Errors that a worker reports by the names of their classes.
_CONFIG_ERRORS = {error.__name__: error for error in (ConfigError, DataPathError, RefusedError)}


def _raise_worker_error(answer: dict[str, Any], unit: Unit) -> None:
    """Raise the error that a worker reported for `unit`."""
    kind, text = answer["kind"], answer["error"]
    if kind == "DataError":
        segment, file, line, reason = json.loads(text)
        if unit.segments[segment].file.format == "jsonl":
            line += records.lines_before(Path(file), unit.segments[segment].start)
        raise DataError(_fault_sentence(file, line, reason))
    if kind == "StoppedError":
        raise StoppedError(text)
    if kind == "OSError":
        raise OSError(answer["errno"], text)
    if kind in _CONFIG_ERRORS:
        raise _CONFIG_ERRORS[kind](text)
    raise KumiError(f"a data worker failed unexpectedly:\n{text}")


def _fault_sentence(file: str, line: int, reason: str) -> str:
    return f"{file}:{line}: {reason}; correct it, or set on_error='skip' to skip and count such records"


def _refuse_faults(folder: Path) -> None:
    """Raise DataError for the first fault of the store in `folder`, if it has one."""
    with store_meta.open_lines(folder, store_meta.FAULTS) as lines:
        for line in lines:
            fault = json_record(line)
            raise DataError(_fault_sentence(fault["file"], fault["line"], fault["reason"]))


def _store_weights(folder: Path, plan: Plan) -> None:
    """Write the weights of the sources to meta.json, which affect only the mixture, not the tokens.

    A store of an earlier version gets the digest of blocks, too.
    """
    meta = store_meta.read_meta(folder)
    assert meta is not None
    weights = [source.weight for source in plan.sources]
    if weights != [entry["weight"] for entry in meta["sources"]] or "blocks" not in meta:
        for entry, weight in zip(meta["sources"], weights, strict=True):
            entry["weight"] = weight
        store_meta.write_json(folder / store_meta.META, {"blocks": plan.blocks} | meta)
