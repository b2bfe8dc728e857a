"""Read and write token files: `<prefix>.bin` has the token ids, `<prefix>.idx` the lengths and offsets of documents.

Megatron's indexed format, version 1, little endian. The index is: 9 bytes `MMIDIDX\\0\\0`; uint64 version; uint8
dtype code; uint64 sequence count N; uint64 length M of the document list; int32[N] lengths in tokens; int64[N] byte
offsets in .bin; int64[M] first sequence of each document, with N at the end. kumi writes each document as one
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

from kumi.data.checksums import Checksums, Guard
from kumi.errors import DataError, RefusedError
from kumi.files.output import open_new
from kumi.files.untrusted import open_stream
from kumi.paths import shown_path

Array = npt.NDArray[Any]
# append(ids, lengths): add documents by their concatenated ids and their lengths.
Append = Callable[[Array, Array], None]

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# The format's codes of dtypes for token ids.
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_BLOCK = 1 << 18  # entries of a list that are processed at a time


@dataclass(frozen=True, eq=False)
class IndexedFile:
    """A memory-mapped .bin/.idx pair.

    tokens: all token ids.
    lengths, offsets, first: the three lists of the index (see above). They are not aligned in memory: do not pass a
        full list to a function that copies unaligned arrays (np.searchsorted).
    guard: verifies the checksums of the blocks that `read` touches; None for no verification.
    vocab_size: `read` accepts only ids below this number; None for no limit.
    """

    prefix: Path
    tokens: Array
    lengths: Array
    offsets: Array
    first: Array
    guard: Guard | None = None
    vocab_size: int | None = None

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def document_count(self) -> int:
        return len(self.first) - 1

    def starts(self, documents: Array) -> Array:
        """Return the position of the first token of each document, int64; `token_count` for `document_count`."""
        sequences = self.first[documents]
        inside = sequences < len(self.offsets)
        starts = np.full(len(sequences), self.token_count, np.int64)
        starts[inside] = self.offsets[sequences[inside]] // self.tokens.itemsize
        return starts

    def read(self, start: int, stop: int) -> Array:
        """Return the ids of the tokens in [start, stop).

        Raise RefusedError when the tokens do not match their checksums, DataError for an id outside the vocabulary.
        """
        if self.guard is not None:
            self.guard.check(int(start) * self.tokens.itemsize, int(stop) * self.tokens.itemsize)
        ids = self.tokens[start:stop]
        if self.vocab_size is not None and len(ids) and (ids.max() >= self.vocab_size or ids.min() < 0):
            index = int(np.argmax((ids >= self.vocab_size) | (ids < 0)))
            raise DataError(
                f"{bin_path(self.prefix)}: token {start + index} is id {ids[index]}, outside the vocabulary of 0 to "
                f"{self.vocab_size - 1}: another tokenizer made the tokens; prepare them with the model's tokenizer"
            )
        return ids

    def document(self, number: int) -> Array:
        """Return the ids of document `number`. Raise the errors of `read`, and RefusedError for a damaged index."""
        start, end = self.starts(np.array([number, number + 1]))
        first, last = self.first[number], self.first[number + 1]
        if not 0 <= first <= last <= len(self.lengths) or self.lengths[first:last].sum(dtype=np.int64) != end - start:
            raise self._contradiction(number)
        return self.read(start, end)

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """Yield (ids, lengths) of all documents in blocks of about 1 Mi tokens; each document must be one sequence."""
        start = 0
        while start < self.document_count:
            lengths = np.array(self.lengths[start : start + _BLOCK // 4])
            count = max(1, int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), 4 * _BLOCK)))
            begin, end = self.starts(np.array([start, min(start + count, self.document_count)]))
            yield self.read(begin, end), lengths[:count]
            start += count

    def check_lists(self) -> None:
        """Raise RefusedError unless each document is one sequence and each offset is the sum of the previous sizes."""
        offset = 0
        for start in range(0, len(self.lengths), _BLOCK):
            sizes = self.lengths[start : start + _BLOCK].astype(np.int64) * self.tokens.itemsize
            ends = offset + np.cumsum(sizes)
            valid = (self.offsets[start : start + _BLOCK] == ends - sizes) & (sizes >= 0)
            valid &= self.first[start : start + len(sizes)] == np.arange(start, start + len(sizes))
            if not valid.all():
                raise self._contradiction(start + int(np.argmin(valid)))
            offset = int(ends[-1])

    def _contradiction(self, number: int) -> RefusedError:
        """Return the error for a document whose length and offset do not fit."""
        return RefusedError(
            f"{idx_path(self.prefix)}: length and offset of document {number} contradict each other: the index is "
            f"damaged, or its sequences are not stored in order without gaps; copy it again or write it again"
        )

    def document_at(self, positions: Array) -> Array:
        """Return the last document that begins at or before each token position, by bisection in the mapped index."""
        low = np.zeros(len(positions), np.int64)
        high = np.full(len(positions), self.document_count, np.int64)
        for _ in range(self.document_count.bit_length() + 1):
            middle = (low + high) >> 1
            begun = self.starts(middle) <= positions
            searching = low < high
            low = np.where(searching & begun, middle + 1, low)
            high = np.where(searching & ~begun, middle, high)
        return low - 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments of `open_file`, with which another process maps the files again."""
        checksums = None if self.guard is None else self.guard.checksums
        return open_file, (self.prefix, checksums, self.vocab_size)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype of token ids by Megatron's rule: uint16 for a vocabulary below 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def bin_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.idx")


def open_file(prefix: Path | str, checksums: Checksums | None = None, vocab_size: int | None = None) -> IndexedFile:
    """Return the memory-mapped pair `prefix`.bin/.idx; `checksums` are those of the .bin file.

    Raise RefusedError for a missing, foreign, damaged or unsupported file.
    """
    prefix = Path(prefix)
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise RefusedError(
                f"{shown_path(path)}: no such file; indexed data needs both {prefix.name}.bin and {prefix.name}.idx"
            )
    dtype, sequences, documents = _header(idx_path(prefix))
    raw = np.memmap(idx_path(prefix), np.uint8, "r")
    lengths, offsets, first = _lists(raw, sequences, documents)
    size = bin_path(prefix).stat().st_size
    expected = int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
    if size != expected:
        fault = "is truncated" if size < expected else "belongs to another index"
        raise RefusedError(
            f"{bin_path(prefix)}: has {size} bytes where its index describes {expected}: it {fault}; "
            "copy both files again"
        )
    if len(first) == 0 or first[0] != 0 or first[-1] != sequences:
        raise RefusedError(
            f"{idx_path(prefix)}: the document list does not run from 0 to {sequences}: the index is damaged; copy it "
            "again"
        )
    tokens = np.memmap(bin_path(prefix), dtype, "r") if size else np.zeros(0, dtype)
    guard = None if checksums is None else Guard(bin_path(prefix), checksums)
    return IndexedFile(prefix, tokens, lengths, offsets, first, guard, vocab_size)


def _header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype, N and M from the header of the index `path`, after checking them against the file's size."""
    with open_stream(path, follow=True) as stream:
        raw = stream.read(_HEADER.size)
        size = os.fstat(stream.fileno()).st_size
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        raise RefusedError(f"{path}: begins with {raw[:9]!r}, not {MAGIC!r}: it is not an index of version 1")
    _, version, code, sequences, documents = _HEADER.unpack(raw)
    if version != 1:
        raise RefusedError(f"{path}: index version {version}; only version 1 is read")
    if code not in _CODES:
        reason = "writers disagree whether it is float32 or float64" if code in (6, 7) else "it is not defined"
        raise RefusedError(
            f"{path}: dtype code {code}: {reason}; token ids must have code {', '.join(map(str, _CODES))}"
        )
    expected = _HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences and sequences:
        raise RefusedError(f"{path}: has a list of modes ({sequences} bytes): multimodal data is not supported")
    if size != expected:
        raise RefusedError(f"{path}: has {size} bytes where its header describes {expected}: truncated or damaged")
    return np.dtype(_CODES[code]).newbyteorder("<"), sequences, documents


def _lists(raw: Array, sequences: int, documents: int) -> tuple[Array, Array, Array]:
    """Return views of `raw`, the bytes of an index, as its lists: lengths, offsets, first sequence of each document."""
    bounds = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
    dtypes = ("<i4", "<i8", "<i8")
    lengths, offsets, first = (raw[a:b].view(t) for a, b, t in zip(bounds[:-1], bounds[1:], dtypes, strict=True))
    return lengths, offsets, first


@contextmanager
def open_writer(prefix: Path | str, dtype: np.dtype[Any]) -> Iterator[Append]:
    """Yield append(tokens, lengths), which adds documents; the pair gets its final name at the end of the block.

    An exception in the block leaves only `.partial` files. Lengths are buffered in a file, so writing an index of any
    size needs constant memory.
    """
    partial, buffered = Path(f"{prefix}.bin.partial"), Path(f"{prefix}.lengths.partial")
    with open_new(partial, "wb", 1 << 20) as tokens_out, open_new(buffered, "wb", 1 << 18) as lengths_out:

        def append(tokens: Array, lengths: Array) -> None:
            assert tokens.dtype == dtype
            assert int(np.sum(lengths, dtype=np.int64)) == len(tokens)
            tokens_out.write(np.ascontiguousarray(tokens).data)
            lengths_out.write(np.ascontiguousarray(lengths, "<i4").data)

        yield append
        _sync(tokens_out)
    _write_index(Path(f"{prefix}.idx.partial"), buffered, dtype)
    os.replace(partial, bin_path(prefix))
    os.replace(f"{prefix}.idx.partial", idx_path(prefix))
    buffered.unlink()


def _write_index(path: Path, lengths: Path, dtype: np.dtype[Any]) -> None:
    """Write the index `path` for documents of one sequence each; the file `lengths` has their lengths, int32."""
    count = lengths.stat().st_size // 4
    code = {name: code for code, name in _CODES.items()}[dtype.name]
    with open_new(path, "wb", 1 << 20) as out:
        out.write(_HEADER.pack(MAGIC, 1, code, count, count + 1))
        for block in _blocks(lengths):
            out.write(block.data)
        offset = 0
        for block in _blocks(lengths):
            ends = np.cumsum(block, dtype=np.int64) * dtype.itemsize
            out.write((offset + ends - block.astype(np.int64) * dtype.itemsize).astype("<i8").data)
            offset += int(ends[-1])
        for start in range(0, count + 1, _BLOCK):
            out.write(np.arange(start, min(start + _BLOCK, count + 1), dtype="<i8").data)
        _sync(out)


def _blocks(path: Path) -> Iterator[Array]:
    with open_stream(path) as stream:
        while len(block := np.frombuffer(stream.read(4 * _BLOCK), "<i4")):
            yield block


def _sync(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())
