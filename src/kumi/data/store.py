"""Open and inspect a store, the folder of prepared data.

A store has the token files of each source, `meta.json` with their counts and origin, `files.jsonl` with all input
files, and `faults.jsonl` with all skipped records."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data import binfile, unit_files
from kumi.data.binfile import Array
from kumi.data.checksums import Checksums, from_plain
from kumi.data.old_plans import remove_old_plans
from kumi.data.packing import PackedRows
from kumi.data.row_source import RowSource
from kumi.data.sampler import Mixture, SequentialSampler
from kumi.data.store_meta import FAULTS, META, SOURCE_TYPES, open_lines, read_meta
from kumi.data.stored_source import (
    References,
    StoredSource,
    check_kind,
    open_rows,
    open_source_units,
    pack_side,
    source_span,
)
from kumi.data.tokenizer import Tokenizer, load
from kumi.data.unit_files import UnitFile, suffixes
from kumi.errors import ConfigError, RefusedError
from kumi.files.untrusted import inside, json_record
from kumi.objectives import LM_ROWS, RowForm


@dataclass(frozen=True)
class Store:
    """A folder of prepared data.

    validation: the fraction of documents that was held out.
    unigram_entropy: entropy of the frequencies of all training tokens, in nats per token.
    fingerprint: digest of the input files (path, size, time) and the options.
    """

    folder: Path
    sources: tuple[StoredSource, ...]
    tokenizer_digest: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    validation: float
    unigram_entropy: float
    fingerprint: str

    @property
    def train_tokens(self) -> int:
        return sum(source.train_tokens for source in self.sources)

    @property
    def validation_tokens(self) -> int:
        return sum(source.validation_tokens for source in self.sources)

    @property
    def content(self) -> str:
        """Digest of training tokens, document lengths, masks and records of units; independent of paths and times."""
        digests = "".join(source.train_digest for source in self.sources)
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    @property
    def documents(self) -> int:
        return sum(source.train_documents + source.validation_documents for source in self.sources)

    @property
    def faults(self) -> dict[str, int]:
        """Number of skipped records by kind, over all sources."""
        total: Counter[str] = Counter()
        for source in self.sources:
            total.update(source.faults)
        return dict(sorted(total.items()))

    def open_units(self, source: StoredSource, side: str) -> UnitFile:
        """Open the units of `side` ("train" or "validation") of `source`, one of this store that has them.

        Raise RefusedError when they are damaged, or `source` has documents.
        """
        return open_source_units(source, side, self.vocab_size)

    def row_sources(
        self,
        side: str,
        seq_len: int,
        seed: int,
        form: RowForm = LM_ROWS,
        *,
        cross_document: bool = False,
        references: References | None = None,
    ) -> list[RowSource]:
        """Open the rows of `side` ("train" or "validation") of each source that has some.

        Raise the errors of `open_rows`.
        """
        options: dict[str, Any] = {"cross_document": cross_document, "references": references}
        sources = [source for source in self.sources if getattr(source, side) is not None]
        return [open_rows(source, side, self.vocab_size, seq_len, seed, form, **options) for source in sources]

    def pack(self, seq_len: int, seed: int, form: RowForm = LM_ROWS) -> dict[str, PackedRows]:
        """Pack the units of all sources of examples into rows; return the training rows by the source's name.

        A plan, which says which units each row has, is stored beside the units. Prompts have a row each, and no plan.
        Plans of other lengths and seeds that were not used for long are removed.
        `form`: the rows that the run's objective trains. Raise the errors of `check_kind` and of `pack_side`.
        """
        for source in self.sources:
            check_kind(source, form)
        examples = [source for source in self.sources if source.kind not in ("text", "prompt")]
        for source in examples:
            if source.validation is not None:
                pack_side(source, "validation", self.vocab_size, seq_len, seed, form)
        trained = [source for source in examples if source.train is not None]
        rows = {s.name: pack_side(s, "train", self.vocab_size, seq_len, seed, form) for s in trained}
        for prefix in (prefix for source in examples for prefix in (source.train, source.validation)):
            if prefix is not None:
                remove_old_plans(prefix)
        return rows

    def document_span(self, seq_len: int, form: RowForm = LM_ROWS) -> float:
        """Return the mean over training tokens of the length of their document in rows of `seq_len` tokens.

        It is the weighted mean over sources; the span of a source of documents is measured on some of its rows.
        """
        spans = [(s.weight, source_span(s, self.vocab_size, seq_len, form)) for s in self.sources if s.train]
        total = sum(weight for weight, span in spans if span)
        return sum(weight / total * span for weight, span in spans if span) if total else float(seq_len)

    def mixture(
        self,
        seq_len: int,
        seed: int,
        *,
        cross_document: bool = False,
        by: str = "tokens",
        epochs: Sequence[float] | None = None,
        form: RowForm = LM_ROWS,
        references: References | None = None,
    ) -> Mixture:
        """Return the training sequences of this store, mixed by the weights of the sources or by `epochs`.

        `by`: whether weights are shares of "tokens" or of "sequences". `epochs`: one number a source, see
        `Mixture.epochs`. `form`: the rows that the run's objective trains.
        """
        if epochs is not None:
            pairs = zip(self.sources, epochs, strict=True)
            epochs = [number for source, number in pairs if source.train]
        rows = self.row_sources("train", seq_len, seed, form, cross_document=cross_document, references=references)
        weights = [source.weight for source in self.sources if source.train]
        return Mixture(list(zip(rows, weights, strict=True)), seq_len, seed, cross_document, by, epochs)

    @property
    def train_names(self) -> list[str]:
        """Names of the sources with training data, in the order of the parts of `mixture`."""
        return [source.name for source in self.sources if source.train]

    @property
    def validation_names(self) -> list[str]:
        """Names of the sources with held-out data, in the order of the parts of `sweep`."""
        return [source.name for source in self.sources if source.validation]

    def sweep(
        self,
        seq_len: int,
        *,
        cross_document: bool = False,
        limit: int = 0,
        form: RowForm = LM_ROWS,
        references: References | None = None,
    ) -> SequentialSampler:
        """Return the validation sequences of this store, at most `limit` if that is greater than 0."""
        rows = self.row_sources("validation", seq_len, 0, form, cross_document=cross_document, references=references)
        return SequentialSampler(rows, seq_len, cross_document, limit)


def open_store(folder: Path | str) -> Store:
    """Return the store in `folder`. Raise RefusedError when it has none, or a token file contradicts meta.json."""
    folder = Path(folder)
    meta = read_meta(folder)
    if meta is None:
        raise RefusedError(f"{folder}: has no {META} of prepared data; run `kumi data prepare` first")
    sources = tuple(_stored_source(folder, entry) for entry in meta["sources"])
    names = ("vocab_size", "eos_id", "bos_id", "validation", "unigram_entropy", "fingerprint")
    return Store(folder, sources, meta["tokenizer"]["sha256"], **{name: meta[name] for name in names})


def inspect(
    place: Store | Path | str, tokens: Tokenizer | None = None, *, documents: int = 3, characters: int = 400
) -> dict[str, Any]:
    """Return the data that `kumi data inspect` shows: meta.json, the first documents of each source, the first faults.

    Documents are decoded with `tokens`; by default with the tokenizer of the preparation, if its folder still has it.
    """
    store = place if isinstance(place, Store) else open_store(place)
    meta = read_meta(store.folder)
    assert meta is not None
    tokens = tokens or _load_unchanged(meta["tokenizer"])
    if tokens is not None and tokens.digest != store.tokenizer_digest:
        raise RefusedError(
            f"{store.folder}: was prepared with tokenizer {store.tokenizer_digest[:12]}, but {tokens.folder} is "
            f"{tokens.digest[:12]}; give the tokenizer it was prepared with"
        )
    for entry, source in zip(meta["sources"], store.sources, strict=True):
        for side in ("train", "validation"):
            entry.pop(f"{side}_checksums", None)
        entry["documents"] = _first_documents(source, tokens, documents, characters)
    with open_lines(store.folder, FAULTS) as lines:
        meta["first_faults"] = [json_record(line) for line in islice(lines, 10)]
    return meta


def _load_unchanged(entry: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of an entry in meta.json, or None if it is missing or was changed."""
    try:
        tokenizer = load(entry["folder"])
    except ConfigError:
        return None
    return tokenizer if tokenizer.digest == entry["sha256"] else None


def _first_documents(
    source: StoredSource, tokens: Tokenizer | None, count: int, characters: int
) -> list[dict[str, Any]]:
    """Return the first `count` training documents of `source`: token counts, first and last ids, decoded text."""
    if source.train is None:
        return []
    file = binfile.open_file(source.train, source.train_checksums)
    documents = []
    for number in range(min(count, file.document_count)):
        ids = file.document(number)
        entry: dict[str, Any] = {"tokens": len(ids), "first_ids": ids[:8].tolist(), "last_ids": ids[-3:].tolist()}
        if tokens is not None:
            entry["text"] = tokens.decode(ids[:characters].tolist())[:characters]
        documents.append(entry)
    return documents


def _stored_source(folder: Path, entry: dict[str, Any]) -> StoredSource:
    """Return the source of an entry in meta.json. Raise RefusedError when its token files contradict the entry."""
    units = entry.get("kind", "text") != "text"
    fields = (name for name in StoredSource.__dataclass_fields__ if not name.endswith("_checksums"))
    # Keys of examples in an entry of text are ignored.
    values = {name: entry[name] for name in fields if units or name in SOURCE_TYPES}
    sidecars: dict[str, dict[str, Checksums]] = {}
    for side in ("train", "validation"):
        if entry[side] is not None:
            # `inside` refuses links out of the folder, for all files of the side.
            values[side] = inside(folder, f"{entry[side]}.bin", RefusedError).with_suffix("")
            listed = entry.get(f"{side}_checksums")
            for suffix in suffixes(entry["kind"] if units else "text", entry.get(f"{side}_weighted") is True):
                path = inside(folder, f"{entry[side]}.{suffix}", RefusedError)
                if units and listed is not None:
                    sidecars.setdefault(side, {})[suffix] = from_plain(listed.get(suffix), path)
            if listed is not None:
                path = binfile.bin_path(values[side])
                values[f"{side}_checksums"] = from_plain(listed.get("bin"), path)
            if units:
                _check_units(folder, entry, side, values[side])
            file = binfile.open_file(values[side])
            actual, expected = (
                (file.token_count, file.document_count),
                (entry[f"{side}_tokens"], entry[f"{side}_documents"]),
            )
            if actual != expected:
                raise RefusedError(
                    f"{values[side]}.bin: has {actual[0]} tokens in {actual[1]} documents, but {META} lists "
                    f"{expected[0]} in {expected[1]}; remove {folder / META} and prepare again"
                )
    for name in ("used", "ignored"):
        if name in values:
            values[name] = tuple(values[name])
    return StoredSource(**values, sidecar_checksums=sidecars)


def _check_units(folder: Path, entry: dict[str, Any], side: str, prefix: Path) -> None:
    """Raise RefusedError unless the files of units fit one another and their entry in meta.json."""
    units = unit_files.open_units(prefix, entry["kind"], weighted=entry[f"{side}_weighted"]).unit_count
    if units != entry[f"{side}_units"]:
        raise RefusedError(
            f"{prefix}.columns.npy: has {units} units, but {META} lists {entry[f'{side}_units']}; remove "
            f"{folder / META} and prepare again"
        )


def entropy(counts: Sequence[int] | Array) -> float:
    """Return the entropy in nats of the distribution with these counts; 0 when all counts are 0."""
    positive = np.asarray(counts, np.float64)
    positive = positive[positive > 0]
    if not len(positive):
        return 0.0
    fractions = positive / positive.sum()
    return float(-(fractions * np.log(fractions)).sum()) + 0.0
