"""Open and inspect a store, the folder of prepared data.

A store has the token files of each source, `meta.json` with their counts and origin, `files.jsonl` with all input
files, and `faults.jsonl` with all skipped records."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kumi.data import binfile
from kumi.data.binfile import Array, IndexedFile
from kumi.data.checksums import Checksums, from_plain
from kumi.data.sampler import Mixture, SequentialSampler
from kumi.data.text_windows import mean_document_span
from kumi.data.tokenizer import Tokenizer, load
from kumi.errors import ConfigError, RefusedError
from kumi.files.output import write_text
from kumi.files.untrusted import INDEX, brief, explain, inside, json_record, open_stream, read_object

META, FAULTS, FILES = "meta.json", "faults.jsonl", "files.jsonl"


_COUNT, _TEXT, _NUMBER, _NONE = (int,), (str,), (int, float), type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "sources": (list,),
    "tokenizer": (dict,),
    "vocab_size": _COUNT,
    "eos_id": _COUNT,
    "bos_id": (int, _NONE),
    "validation": _NUMBER,
    "unigram_entropy": _NUMBER,
    "fingerprint": _TEXT,
}
_SOURCE_TYPES: dict[str, tuple[type, ...]] = {
    "name": _TEXT,
    "path": _TEXT,
    "weight": _NUMBER,
    "train": (str, _NONE),
    "validation": (str, _NONE),
    "train_documents": _COUNT,
    "train_tokens": _COUNT,
    "validation_documents": _COUNT,
    "validation_tokens": _COUNT,
    "faults": (dict,),
    "special_tokens_in_text": _COUNT,
    "unigram_entropy": _NUMBER,
    "train_digest": _TEXT,
    "validation_digest": _TEXT,
}
_OPTIONAL = ("train_checksums", "validation_checksums")


@dataclass(frozen=True)
class StoredSource:
    """The tokens of one source.

    train, validation: prefix of the token files; None when the side has no document.
    faults: number of skipped records by kind.
    special_tokens_in_text: special tokens that are spelled out in the text of documents.
    unigram_entropy: of the training tokens, in nats per token.
    train_digest, validation_digest: digest of token ids and document lengths.
    train_checksums, validation_checksums: checksums of the .bin file; None in a store of an earlier version that has
        not been verified yet.
    """

    name: str
    path: str
    weight: float
    train: Path | None
    validation: Path | None
    train_documents: int
    train_tokens: int
    validation_documents: int
    validation_tokens: int
    faults: dict[str, int]
    special_tokens_in_text: int
    unigram_entropy: float
    train_digest: str
    validation_digest: str
    train_checksums: Checksums | None = None
    validation_checksums: Checksums | None = None


@dataclass(frozen=True)
class Store:
    """A folder of prepared data.

    unigram_entropy: of all training tokens, in nats per token.
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
        """Digest of the training tokens and document lengths; independent of paths and times."""
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

    def train_parts(self) -> list[tuple[IndexedFile, float]]:
        """Open the training files; return them with their weights."""
        files = ((binfile.open_file(s.train, s.train_checksums, self.vocab_size), s) for s in self.sources if s.train)
        return [(file, source.weight) for file, source in files]

    def validation_parts(self) -> list[IndexedFile]:
        """Open the validation files."""
        held_out = ((s.validation, s.validation_checksums) for s in self.sources if s.validation)
        return [binfile.open_file(prefix, checksums, self.vocab_size) for prefix, checksums in held_out]

    def document_span(self, seq_len: int) -> float:
        """Return the `BatchSpec.document_span` of the training data in rows of `seq_len` tokens.

        It is the weighted mean over sources, each from some of its rows.
        """
        parts = [(file, weight) for file, weight in self.train_parts() if file.token_count > 1]
        total = sum(weight for _, weight in parts)
        return (
            sum(weight / total * mean_document_span(file, seq_len) for file, weight in parts)
            if parts
            else float(seq_len)
        )

    def mixture(self, seq_len: int, seed: int, *, cross_document: bool = False) -> Mixture:
        """Return the training sequences of this store."""
        return Mixture(self.train_parts(), seq_len, seed, cross_document)

    def sweep(self, seq_len: int, *, cross_document: bool = False, limit: int = 0) -> SequentialSampler:
        """Return the validation sequences of this store, at most `limit` if that is greater than 0."""
        return SequentialSampler(self.validation_parts(), seq_len, cross_document, limit)


def open_store(folder: Path | str) -> Store:
    """Return the store in `folder`. Raise RefusedError when it has none, or a token file contradicts meta.json."""
    folder = Path(folder)
    meta = read_meta(folder)
    if meta is None:
        raise RefusedError(f"{folder}: has no {META} of prepared data; run `kumi data prepare` first")
    sources = tuple(_stored_source(folder, entry) for entry in meta["sources"])
    names = ("vocab_size", "eos_id", "bos_id", "validation", "unigram_entropy", "fingerprint")
    return Store(folder, sources, meta["tokenizer"]["sha256"], **{name: meta[name] for name in names})


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the checked content of a store's meta.json, or None when `folder` is not a store."""
    if not (folder / META).exists():
        return None
    meta = read_object(folder, META, RefusedError, INDEX)
    if meta.get("kind") != "kumi data":
        return None
    _check_types(folder, "", meta, _TYPES)
    _check_types(folder, "tokenizer.", meta["tokenizer"], {"folder": (str,), "sha256": (str,)})
    for entry in meta["sources"]:
        if not isinstance(entry, dict):
            raise RefusedError(f"{folder / META}: the source {brief(entry)} is not an object; prepare the data again")
        _check_types(folder, "sources.", entry, _SOURCE_TYPES)
        _check_types(folder, "sources.", entry, {key: (dict, _NONE) for key in _OPTIONAL if key in entry})
    return meta


def _check_types(folder: Path, prefix: str, entry: dict[str, Any], types: dict[str, tuple[type, ...]]) -> None:
    """Raise RefusedError unless `entry` has all keys of `types` with values of their types, and no negative number."""
    for key, expected in types.items():
        value = entry.get(key, brief)  # the function `brief` stands for a missing value; JSON has no functions
        if not isinstance(value, expected) or isinstance(value, bool) or (isinstance(value, int | float) and value < 0):
            fault = "is missing" if value is brief else f"is {brief(value)}"
            raise RefusedError(f"{folder / META}: {prefix}{key} {fault}; remove the folder and prepare again")


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
    values = {name: entry[name] for name in StoredSource.__dataclass_fields__ if not name.endswith("_checksums")}
    for side in ("train", "validation"):
        if entry[side] is not None:
            # `inside` refuses links out of the folder, for both files of the pair.
            values[side] = inside(folder, f"{entry[side]}.bin", RefusedError).with_suffix("")
            inside(folder, f"{entry[side]}.idx", RefusedError)
            if (checksums := entry.get(f"{side}_checksums")) is not None:
                path = binfile.bin_path(values[side])
                values[f"{side}_checksums"] = from_plain(checksums.get("bin"), path)
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
    return StoredSource(**values)


def entropy(counts: Sequence[int] | Array) -> float:
    """Return the entropy in nats of the distribution with these counts; 0 when all counts are 0."""
    positive = np.asarray(counts, np.float64)
    positive = positive[positive > 0]
    if not len(positive):
        return 0.0
    fractions = positive / positive.sum()
    return float(-(fractions * np.log(fractions)).sum()) + 0.0


def open_lines(folder: Path, name: str) -> TextIO:
    """Open the text file `name` of a store. Raise RefusedError when it is unreadable or a link out of the folder."""
    try:
        return io.TextIOWrapper(open_stream(inside(folder, name, RefusedError)), encoding="utf-8", errors="replace")
    except OSError as error:
        raise RefusedError(f"{folder / name}: cannot be read ({explain(error)}); prepare the data again") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    partial = path.with_name(path.name + ".partial")
    write_text(partial, json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)
