"""Read units of examples: a token file whose documents are sequences, with sidecars of one value a token or a unit.

A unit is an `EncodedUnit`: one sequence, or the two sides of a preference. Its sequences are consecutive documents of
`<prefix>.bin/.idx`, which Megatron reads as well. Beside them lie `.mask` (uint8 a token, see `kumi.data.chat.masked`),
`.turn` (uint16 a token), `.weight` (float32 a token, only if a weight is not 1), `.columns.npy` (one record a unit, of
`UNIT_COLUMNS`), and for prompts `.extra.bin/.idx` (one document a unit: the bytes of a JSON object). All are little
endian."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data import binfile
from kumi.data.binfile import Array, IndexedFile
from kumi.data.checksums import Checksums, Guard, remedy
from kumi.errors import RefusedError
from kumi.files.untrusted import explain, json_record, open_stream

TOKEN_SIDECARS: dict[str, np.dtype[Any]] = {"mask": np.dtype("u1"), "turn": np.dtype("<u2"), "weight": np.dtype("<f4")}
COLUMNS_SUFFIX, EXTRA_SUFFIX = "columns.npy", "extra"
# first_document, documents: the unit's sequences, as documents of the token file. label: of feedback, 1 desirable, 0
# not, -1 none. margin: of a preference, nan for none. tokens, trained: sums over the unit's sequences. digest: of the
# content of the row of data; units of one row share it.
UNIT_COLUMNS = np.dtype(
    [
        ("first_document", "<i8"),
        ("documents", "<i4"),
        ("label", "i1"),
        ("margin", "<f4"),
        ("tokens", "<i4"),
        ("trained", "<i4"),
        ("digest", "<u8"),
    ]
)
# The most units, and about the tokens, that are processed at a time.
_BLOCK = 1 << 16
_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """The tokens of one unit, or of consecutive units: all sequences one after another.

    ids, mask, turns, weights: one value a token, as in `MaskedSequence`; weights is None if all are 1.
    lengths: tokens of each sequence, int32.
    """

    ids: Array
    mask: Array
    turns: Array
    weights: Array | None
    lengths: Array


@dataclass(frozen=True, eq=False)
class UnitFile:
    """The units of one source's training or validation data, memory-mapped.

    kind: the kind of the rows of data that became units: one of `kumi.spec.data_source.ROW_KINDS`, but not "auto" or
        "text".
    file: the sequences; document n is sequence n.
    mask, turns, weights: one value for each token of the file; weights is None if all are 1.
    columns: (units,) records of `UNIT_COLUMNS`. They are not aligned in memory: copy what is used often.
    extra: for prompts the columns of each unit, its own `prompt` among them, as bytes of a JSON object.
    guards: verifiers of the sidecars by suffix; empty for no verification.
    """

    prefix: Path
    kind: str
    file: IndexedFile
    mask: Array
    turns: Array
    weights: Array | None
    columns: Array
    extra: IndexedFile | None = None
    guards: Mapping[str, Guard] = field(default_factory=dict)

    @property
    def unit_count(self) -> int:
        return len(self.columns)

    @property
    def token_count(self) -> int:
        return self.file.token_count

    @property
    def weighted(self) -> bool:
        """Return True if a token has a weight other than 1."""
        return self.weights is not None

    def tokens_of(self, unit: int) -> UnitTokens:
        """Return the tokens of unit number `unit`.

        Raise RefusedError when they do not match their checksums or the columns contradict the index, DataError for an
        id outside the vocabulary.
        """
        return self.tokens_between(unit, unit + 1)

    def tokens_between(self, first: int, last: int) -> UnitTokens:
        """Return the tokens of the units in [first, last), at least one; raise the errors of `tokens_of`."""
        begin, end = (self.columns[unit] for unit in (first, last - 1))
        low, high = int(begin["first_document"]), int(end["first_document"]) + int(end["documents"])
        if not 0 <= low < high <= self.file.document_count:
            raise self._contradiction(first)
        start, stop = (int(place) for place in self.file.starts(np.array([low, high])))
        lengths = np.array(self.file.lengths[low:high])
        expected = int(self.columns["tokens"][first:last].sum(dtype=np.int64))
        if not 0 <= start <= stop <= self.token_count or not expected == stop - start == lengths.sum(dtype=np.int64):
            raise self._contradiction(first)
        for suffix, guard in self.guards.items():
            if suffix in TOKEN_SIDECARS:
                size = TOKEN_SIDECARS[suffix].itemsize
                guard.check(start * size, stop * size)
        weights = None if self.weights is None else self.weights[start:stop]
        return UnitTokens(self.file.read(start, stop), self.mask[start:stop], self.turns[start:stop], weights, lengths)

    def extra_of(self, unit: int) -> dict[str, Any]:
        """Return the columns of unit number `unit`, with its `prompt`; {} for all kinds except "prompt"."""
        if self.extra is None:
            return {}
        try:
            value = json_record(self.extra.document(unit).tobytes().decode())
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise RefusedError(
                f"{binfile.bin_path(self.extra.prefix)}: the columns of unit {unit} are no JSON object: the file is "
                f"damaged; {remedy(self.extra.prefix)}"
            )
        return value

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first, last) of runs of units with about 1 Mi tokens each, which cover all units in order."""
        first = 0
        while first < self.unit_count:
            sums = np.cumsum(self.columns["tokens"][first : first + _BLOCK], dtype=np.int64)
            count = max(1, int(np.searchsorted(sums, _BLOCK_TOKENS)))
            yield first, min(first + count, self.unit_count)
            first += count

    def check_lists(self) -> None:
        """Raise RefusedError unless the units cover all documents in order, and their counts agree with the index."""
        document = 0
        for first in range(0, self.unit_count, _BLOCK):
            columns = np.array(self.columns[first : first + _BLOCK])
            counts = columns["documents"].astype(np.int64)
            starts = document + np.cumsum(counts) - counts
            valid = (counts > 0) & (columns["first_document"] == starts) & np.isin(columns["label"], (-1, 0, 1))
            valid &= (columns["trained"] >= 0) & (columns["trained"] <= columns["tokens"])
            if valid.all() and document + int(counts.sum()) <= self.file.document_count:
                lengths = np.array(self.file.lengths[document : document + int(counts.sum())], np.int64)
                valid = np.add.reduceat(lengths, starts - document) == columns["tokens"]
            else:
                valid[-1] &= document + int(counts.sum()) <= self.file.document_count
            if not valid.all():
                raise self._contradiction(first + int(np.argmin(valid)))
            document += int(counts.sum())
        if document != self.file.document_count:
            raise self._contradiction(self.unit_count - 1)

    def _contradiction(self, unit: int) -> RefusedError:
        """Return the error for a record that contradicts the index."""
        path = sidecar_path(self.prefix, COLUMNS_SUFFIX)
        return RefusedError(
            f"{path}: the record of unit {unit} contradicts the index of the sequences: one of the files is damaged or "
            f"belongs to another store; {remedy(path)}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of `open_units`, with which another process maps the files again."""
        checksums = {suffix: guard.checksums for suffix, guard in self.guards.items()}
        for prefix, file in (("", self.file), (f"{EXTRA_SUFFIX}.", self.extra)):
            if file is not None and file.guard is not None:
                checksums[f"{prefix}bin"] = file.guard.checksums
        return open_units, (self.prefix, self.kind, checksums, self.file.vocab_size, self.weighted)


def sidecar_path(prefix: Path | str, suffix: str) -> Path:
    return Path(f"{prefix}.{suffix}")


def suffixes(kind: str, weighted: bool = False) -> list[str]:
    """Return the suffixes of the files of a source of `kind`: token files, and for all kinds but text the sidecars."""
    if kind == "text":
        return ["bin", "idx"]
    extra = [f"{EXTRA_SUFFIX}.bin", f"{EXTRA_SUFFIX}.idx"] if kind == "prompt" else []
    return ["bin", "idx", "mask", "turn", *(["weight"] if weighted else []), COLUMNS_SUFFIX, *extra]


def open_units(
    prefix: Path | str,
    kind: str,
    checksums: Mapping[str, Checksums] | None = None,
    vocab_size: int | None = None,
    weighted: bool | None = None,
) -> UnitFile:
    """Return the memory-mapped units of the files `prefix`, made from rows of `kind`.

    `checksums`: those of the files by suffix; a file without them is not verified.

    With `weighted` None the file of weights is read if it exists. Raise RefusedError for a missing, foreign, damaged or
    unsupported file.
    """
    prefix, checksums = Path(prefix), checksums or {}
    file = binfile.open_file(prefix, checksums.get("bin"), vocab_size)
    weighted = sidecar_path(prefix, "weight").is_file() if weighted is None else weighted
    per_token = [
        _map_tokens(sidecar_path(prefix, suffix), dtype, file.token_count)
        for suffix, dtype in TOKEN_SIDECARS.items()
        if suffix != "weight" or weighted
    ]
    columns = _map_columns(sidecar_path(prefix, COLUMNS_SUFFIX))
    extra = None
    if kind == "prompt":
        extra = binfile.open_file(sidecar_path(prefix, EXTRA_SUFFIX), checksums.get(f"{EXTRA_SUFFIX}.bin"))
        if extra.document_count != len(columns) or extra.tokens.dtype != np.uint8:
            raise RefusedError(
                f"{binfile.idx_path(extra.prefix)}: has {extra.document_count} documents of {extra.tokens.dtype} where "
                f"{len(columns)} of uint8, one for each unit, were expected: it belongs to another store; "
                f"{remedy(extra.prefix)}"
            )
    guards = {
        suffix: Guard(sidecar_path(prefix, suffix), checksums[suffix])
        for suffix in suffixes(kind, weighted)[2:]
        if suffix in checksums and suffix in TOKEN_SIDECARS
    }
    mask, turns, weights = [*per_token, None][:3]
    assert mask is not None
    assert turns is not None
    return UnitFile(prefix, kind, file, mask, turns, weights, columns, extra, guards)


def _map_tokens(path: Path, dtype: np.dtype[Any], count: int) -> Array:
    """Return the values of `path`, one a token. Raise RefusedError unless there are `count`."""
    try:
        with open_stream(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size == count * dtype.itemsize:
                return np.memmap(stream, dtype, "r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise RefusedError(f"{path}: cannot be read ({explain(error)}); {remedy(path)}") from None
    raise RefusedError(
        f"{path}: has {size} bytes where {count} tokens of {dtype.itemsize} bytes were expected: it is damaged or "
        f"belongs to other tokens; {remedy(path)}"
    )


def _map_columns(path: Path) -> Array:
    """Return the records of the array file `path`. Raise RefusedError unless it has one dimension of `UNIT_COLUMNS`."""
    try:
        with open_stream(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            shape, dtype = _read_header(stream)
            start = stream.tell()
            if dtype != UNIT_COLUMNS or len(shape) != 1:
                raise ValueError(f"it holds an array of shape {shape} and other columns than kumi writes")
            if size - start != shape[0] * UNIT_COLUMNS.itemsize:
                raise ValueError(f"it has {size} bytes where {shape[0]} records were expected")
            return np.memmap(stream, UNIT_COLUMNS, "r", start) if shape[0] else np.zeros(0, UNIT_COLUMNS)
    except (OSError, ValueError) as error:
        reason = explain(error)
    raise RefusedError(f"{path}: is no readable list of units ({reason}); {remedy(path)}")


def _read_header(stream: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype from the header of an array file. Raise ValueError unless it is of version 1.0."""
    try:
        if np.lib.format.read_magic(stream) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            return shape, dtype
    except Exception as error:  # numpy parses the header as a Python literal; a damaged one raises anything
        raise ValueError("its header is damaged") from error
    raise ValueError("its header is not of version 1.0")
