"""A prepared folder: token files of each source, `meta.json` with what they hold and where they come from,
`files.jsonl` with every input file, `faults.jsonl` with every record that was left out."""

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
from kumi.data.mix import Mixture, Sweep
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
    """The tokens of one source. A prefix is None where that side has no document; a digest is that of its
    token ids and document lengths, checksums are those of the blocks of its .bin file, None in a store of an earlier
    version that has not been verified yet. `faults` counts records by kind,
    `special_tokens_in_text` the special tokens that documents spelled out themselves."""

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
    """A prepared folder. `unigram_entropy` is that of all training tokens, in nats a token. `fingerprint` names
    the inputs as they were found, `content` the tokens themselves."""

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
        """A digest of the training tokens and documents themselves: equal wherever they came from and lie now."""
        digests = "".join(source.train_digest for source in self.sources)
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    @property
    def documents(self) -> int:
        return sum(source.train_documents + source.validation_documents for source in self.sources)

    @property
    def faults(self) -> dict[str, int]:
        """Records left out, by kind, over all sources."""
        total: Counter[str] = Counter()
        for source in self.sources:
            total.update(source.faults)
        return dict(sorted(total.items()))

    def train_parts(self) -> list[tuple[IndexedFile, float]]:
        """Open training files with their weights."""
        files = ((binfile.open_file(s.train, s.train_checksums, self.vocab_size), s) for s in self.sources if s.train)
        return [(file, source.weight) for file, source in files]

    def validation_parts(self) -> list[IndexedFile]:
        """Open validation files."""
        held_out = ((s.validation, s.validation_checksums) for s in self.sources if s.validation)
        return [binfile.open_file(prefix, checksums, self.vocab_size) for prefix, checksums in held_out]

    def mixture(self, seq_len: int, seed: int, *, cross_document: bool = False) -> Mixture:
        """The training sequences of this store."""
        return Mixture(self.train_parts(), seq_len, seed, cross_document)

    def sweep(self, seq_len: int, *, cross_document: bool = False, limit: int = 0) -> Sweep:
        """The validation sequences of this store, or `limit` of them."""
        return Sweep(self.validation_parts(), seq_len, cross_document, limit)


def open_store(folder: Path | str) -> Store:
    """The store in `folder`. Raises RefusedError when there is none or a token file is not the one described."""
    folder = Path(folder)
    meta = read_meta(folder)
    if meta is None:
        raise RefusedError(f"{folder}: no {META} of prepared data; run `kumi data prepare` first")
    sources = tuple(_source(folder, entry) for entry in meta["sources"])
    names = ("vocab_size", "eos_id", "bos_id", "validation", "unigram_entropy", "fingerprint")
    return Store(folder, sources, meta["tokenizer"]["sha256"], **{name: meta[name] for name in names})


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What meta.json of a prepared folder says, or None when there is none."""
    if not (folder / META).exists():
        return None
    meta = read_object(folder, META, RefusedError, INDEX)
    if meta.get("kind") != "kumi data":
        return None
    _check_types(folder, "", meta, _TYPES)
    _check_types(folder, "tokenizer.", meta["tokenizer"], {"folder": (str,), "sha256": (str,)})
    for entry in meta["sources"]:
        if not isinstance(entry, dict):
            raise RefusedError(f"{folder / META}: {brief(entry)} describes no source; prepare the data again")
        _check_types(folder, "sources.", entry, _SOURCE_TYPES)
        _check_types(folder, "sources.", entry, {key: (dict, _NONE) for key in _OPTIONAL if key in entry})
    return meta


def _check_types(folder: Path, where: str, found: dict[str, Any], types: dict[str, tuple[type, ...]]) -> None:
    """Raise RefusedError when a key of `types` is missing in `found`, or of another type, or a number is negative."""
    for key, kinds in types.items():
        value = found.get(key, brief)  # a function, which no key is
        if not isinstance(value, kinds) or isinstance(value, bool) or (isinstance(value, int | float) and value < 0):
            said = "is missing" if value is brief else f"is {brief(value)}"
            raise RefusedError(f"{folder / META}: {where}{key} {said}; remove the folder and prepare again")


def inspect(
    place: Store | Path | str, tokens: Tokenizer | None = None, *, documents: int = 3, characters: int = 400
) -> dict[str, Any]:
    """What `kumi data inspect` shows: meta.json with the counts, the first documents of each source, the first
    faults.

    Documents are decoded with `tokens`, or else with the tokenizer they were made with where that still lies in its
    folder."""
    store = place if isinstance(place, Store) else open_store(place)
    meta = read_meta(store.folder)
    assert meta is not None
    tokens = tokens or _own_tokenizer(meta["tokenizer"])
    if tokens is not None and tokens.digest != store.tokenizer_digest:
        raise RefusedError(
            f"{store.folder}: was prepared with tokenizer {store.tokenizer_digest[:12]}, {tokens.folder} is "
            f"{tokens.digest[:12]}; give the tokenizer it was prepared with"
        )
    for entry, source in zip(meta["sources"], store.sources, strict=True):
        for side in ("train", "validation"):
            entry.pop(f"{side}_checksums", None)
        entry["documents"] = _first_documents(source, tokens, documents, characters)
    with open_lines(store.folder, FAULTS) as lines:
        meta["first_faults"] = [json_record(line) for line in islice(lines, 10)]
    return meta


def _own_tokenizer(described: dict[str, Any]) -> Tokenizer | None:
    try:
        found = load(described["folder"])
    except ConfigError:
        return None
    return found if found.digest == described["sha256"] else None


def _first_documents(
    source: StoredSource, tokens: Tokenizer | None, count: int, characters: int
) -> list[dict[str, Any]]:
    if source.train is None:
        return []
    file = binfile.open_file(source.train, source.train_checksums)
    shown = []
    for number in range(min(count, file.document_count)):
        ids = file.document(number)
        entry: dict[str, Any] = {"tokens": len(ids), "first_ids": ids[:8].tolist(), "last_ids": ids[-3:].tolist()}
        if tokens is not None:
            entry["text"] = tokens.decode(ids[:characters].tolist())[:characters]
        shown.append(entry)
    return shown


def _source(folder: Path, entry: dict[str, Any]) -> StoredSource:
    values = {name: entry[name] for name in StoredSource.__dataclass_fields__ if not name.endswith("_checksums")}
    for side in ("train", "validation"):
        if entry[side] is not None:
            # Both files of the pair lie in the folder.
            values[side] = inside(folder, f"{entry[side]}.bin", RefusedError).with_suffix("")
            inside(folder, f"{entry[side]}.idx", RefusedError)
            if (checksums := entry.get(f"{side}_checksums")) is not None:
                path = binfile.bin_path(values[side])
                values[f"{side}_checksums"] = from_plain(checksums.get("bin"), path)
            found = binfile.open_file(values[side])
            have, want = (
                (found.token_count, found.document_count),
                (entry[f"{side}_tokens"], entry[f"{side}_documents"]),
            )
            if have != want:
                raise RefusedError(
                    f"{values[side]}.bin: holds {have[0]} tokens in {have[1]} documents where {META} says {want[0]} in "
                    f"{want[1]}; remove {folder / META} and prepare again"
                )
    return StoredSource(**values)


def entropy(counts: Sequence[int] | Array) -> float:
    """Entropy in nats of the distribution that the counts give; 0 for none."""
    seen = np.asarray(counts, np.float64)
    seen = seen[seen > 0]
    if not len(seen):
        return 0.0
    share = seen / seen.sum()
    return float(-(share * np.log(share)).sum()) + 0.0


def open_lines(folder: Path, name: str) -> TextIO:
    """Open the text file `name` of a prepared folder; RefusedError when it cannot be read, or is a link out of it."""
    try:
        return io.TextIOWrapper(open_stream(inside(folder, name, RefusedError)), encoding="utf-8", errors="replace")
    except OSError as error:
        raise RefusedError(f"{folder / name}: cannot be read ({explain(error)}); prepare the data again") from None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file so that it appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    write_text(partial, json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)
