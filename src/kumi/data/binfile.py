"""Token files: `<prefix>.bin` holds ids back to back, `<prefix>.idx` says where sequences and documents begin.

Megatron's indexed format, version 1, little endian. The index is: 9 bytes `MMIDIDX\\0\\0`; uint64 version; uint8
dtype code; uint64 sequence count N; uint64 length M of the document list; int32[N] lengths in tokens; int64[N] byte
offsets in .bin; int64[M] first sequence of each document, with N at the end. A document that kumi writes is one
sequence."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kumi.errors import RefusedError

Array = npt.NDArray[Any]
Append = Callable[[Array, Array], None]

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_BLOCK = 1 << 18


@dataclass(frozen=True, eq=False)
class IndexedFile:
    """A .bin/.idx pair mapped into memory. `lengths`, `offsets` and `first` are the three lists of the index; they
    are not aligned in memory, so a function that copies to align (np.searchsorted) must not get them whole."""

    prefix: Path
    tokens: Array
    lengths: Array
    offsets: Array
    first: Array

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        return len(self.first) - 1

    def starts(self, documents: Array) -> Array:
        """First token of each of `documents`, as int64; a document behind the last starts at the end."""
        sequences = self.first[documents]
        inside = sequences < len(self.offsets)
        starts = np.full(len(sequences), self.token_count, np.int64)
        starts[inside] = self.offsets[sequences[inside]] // self.tokens.itemsize
        return starts

    def document(self, number: int) -> Array:
        """The ids of one document."""
        start, end = self.starts(np.array([number, number + 1]))
        return self.tokens[start:end]

    def document_at(self, positions: Array) -> Array:
        """The last document that begins at or before each token position, by bisection in the mapped index."""
        low = np.zeros(len(positions), np.int64)
        high = np.full(len(positions), self.document_count, np.int64)
        for _ in range(self.document_count.bit_length() + 1):
            middle = (low + high) >> 1
            right = self.starts(middle) <= positions
            open_ = low < high
            low = np.where(open_ & right, middle + 1, low)
            high = np.where(open_ & ~right, middle, high)
        return low - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return open_file, (self.prefix,)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 for a vocabulary under 65,500, else int32: Megatron's rule."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def bin_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.idx")


def open_file(prefix: Path | str) -> IndexedFile:
    """The pair `prefix`.bin/.idx. Raises RefusedError for a foreign, damaged or unsupported file, with the values."""
    prefix = Path(prefix)
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise RefusedError(f"{path}: no such file; indexed data needs both {prefix.name}.bin and {prefix.name}.idx")
    dtype, sequences, documents = _header(idx_path(prefix))
    raw = np.memmap(idx_path(prefix), np.uint8, "r")
    lengths, offsets, first = _lists(raw, sequences, documents)
    size = bin_path(prefix).stat().st_size
    expected = int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
    if size != expected:
        state = "truncated" if size < expected else "not of this index"
        raise RefusedError(
            f"{bin_path(prefix)}: has {size} bytes where its index describes {expected}: it is {state}; "
            "copy both files again"
        )
    if len(first) == 0 or first[0] != 0 or first[-1] != sequences:
        raise RefusedError(
            f"{idx_path(prefix)}: the document list does not run from 0 to {sequences}: the index is damaged"
        )
    tokens = np.memmap(bin_path(prefix), dtype, "r") if size else np.zeros(0, dtype)
    return IndexedFile(prefix, tokens, lengths, offsets, first)


def _header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """dtype, N and M from the index's header, checked against the file's size."""
    with open(path, "rb") as stream:
        raw = stream.read(_HEADER.size)
        size = os.fstat(stream.fileno()).st_size
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        raise RefusedError(f"{path}: begins with {raw[:9]!r} and not with {MAGIC!r}: not an index of version 1")
    _, version, code, sequences, documents = _HEADER.unpack(raw)
    if version != 1:
        raise RefusedError(f"{path}: index version {version}; only version 1 is read")
    if code not in _CODES:
        why = "it means float32 in one writer and float64 in another" if code in (6, 7) else "it is not defined"
        raise RefusedError(f"{path}: dtype code {code}: {why}; token ids must be of code {', '.join(map(str, _CODES))}")
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences and sequences:
        raise RefusedError(f"{path}: holds a list of modes ({sequences} bytes): multimodal data is not read")
    if size != expected:
        raise RefusedError(f"{path}: has {size} bytes where its header describes {expected}: truncated or damaged")
    return np.dtype(_CODES[code]).newbyteorder("<"), sequences, documents


def _lists(raw: Array, sequences: int, documents: int) -> tuple[Array, Array, Array]:
    cuts = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
    kinds = ("<i4", "<i8", "<i8")
    lengths, offsets, first = (raw[a:b].view(kind) for a, b, kind in zip(cuts[:-1], cuts[1:], kinds, strict=True))
    return lengths, offsets, first


@contextmanager
def writing(prefix: Path | str, dtype: np.dtype[Any]) -> Iterator[Append]:
    """A function append(tokens, lengths) that adds documents; the pair appears under its name when the block ends
    well.

    Lengths wait in a file, not in memory, so an index of any size is written in constant memory.
    """
    partial, waiting = Path(f"{prefix}.bin.partial"), Path(f"{prefix}.lengths.partial")
    with open(partial, "wb", buffering=1 << 20) as tokens_out, open(waiting, "wb", buffering=1 << 18) as lengths_out:

        def append(tokens: Array, lengths: Array) -> None:
            assert tokens.dtype == dtype
            assert int(np.sum(lengths, dtype=np.int64)) == len(tokens)
            tokens_out.write(np.ascontiguousarray(tokens).data)
            lengths_out.write(np.ascontiguousarray(lengths, "<i4").data)

        yield append
        _sync(tokens_out)
    _write_index(Path(f"{prefix}.idx.partial"), waiting, dtype)
    os.replace(partial, bin_path(prefix))
    os.replace(f"{prefix}.idx.partial", idx_path(prefix))
    waiting.unlink()


def _write_index(path: Path, waiting: Path, dtype: np.dtype[Any]) -> None:
    count = waiting.stat().st_size // 4
    code = {name: code for code, name in _CODES.items()}[dtype.name]
    with open(path, "wb", buffering=1 << 20) as out:
        out.write(_HEADER.pack(MAGIC, 1, code, count, count + 1))
        for block in _blocks(waiting):
            out.write(block.data)
        offset = 0
        for block in _blocks(waiting):
            ends = np.cumsum(block, dtype=np.int64) * dtype.itemsize
            out.write((offset + ends - block.astype(np.int64) * dtype.itemsize).astype("<i8").data)
            offset += int(ends[-1])
        for start in range(0, count + 1, _BLOCK):
            out.write(np.arange(start, min(start + _BLOCK, count + 1), dtype="<i8").data)
        _sync(out)


def _blocks(path: Path) -> Iterator[Array]:
    with open(path, "rb") as stream:
        while len(block := np.frombuffer(stream.read(4 * _BLOCK), "<i4")):
            yield block


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
