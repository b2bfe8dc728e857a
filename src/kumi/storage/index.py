"""Parse and check a checkpoint's index, which is untrusted: after the checks, reads stay in the files that it lists.

The index lists the shards, which are the files of the ranks, and for each tensor the pieces of it in these files.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.errors import RefusedError
from kumi.files.untrusted import brief, inside
from kumi.storage.write import DTYPES, ITEMSIZE, blocks, tiling_problem

if TYPE_CHECKING:
    import torch

# The safetensors name of each dtype -> torch's name.
_NAMES = {stored: name for name, stored in DTYPES.items()}
# Bytes of a file, or elements of a tensor, above which an index is refused.
_MAX_SIZE = 2**60
# What `_are_sizes` requires, as a part of error messages.
_SIZES = "whole numbers from 0 to 2**60 - 1"


@dataclass(frozen=True)
class StoredPiece:
    """A rectangle of a global tensor and its position on disk.

    file: name of the shard.
    start, extent: first index and length in each dim of the global tensor.
    offset: first byte in `file`.
    sums: CRC-32 of each block of full rows (see `kumi.storage.write`).
    """

    file: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor: torch's name of its dtype, shape and pieces."""

    dtype_name: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype as an object of torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return ITEMSIZE[self.dtype_name]

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class StoredFile:
    """A shard: its size in bytes, and the length in bytes and CRC-32 of its safetensors header."""

    size: int
    header: int
    crc32: int


class IndexFault(ValueError):
    """A fault in an index or in a file that it lists; `file` names the faulty file, "" the index itself."""

    def __init__(self, reason: str, file: str = "") -> None:
        super().__init__(reason)
        self.file = file


def parse_files(folder: Path, index: Mapping[str, Any]) -> dict[str, StoredFile]:
    """Return the shards in `index`; raise IndexFault unless each exists in `folder` with its size."""
    files: dict[str, StoredFile] = {}
    for entry in _objects("files", index.get("files"), {"name", "size", "header", "crc32"}):
        name, file = entry["name"], StoredFile(entry["size"], entry["header"], entry["crc32"])
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise IndexFault(f"the index lists the file {brief(name)}, which is not a safetensors file")
        if name in files:
            raise IndexFault(f"the index lists the file {name!r} twice")
        if not _are_sizes([file.size, file.header, file.crc32]):
            raise IndexFault(
                f"the index gives {name!r} {brief(file.size)} bytes, {brief(file.header)} bytes for its header and the "
                f"checksum {brief(file.crc32)}, and these must be {_SIZES}"
            )
        if file.header > file.size:
            raise IndexFault(
                f"the index gives {name!r} {file.size} bytes, and {file.header} bytes for its header alone"
            )
        try:
            size = os.stat(inside(folder, name, RefusedError)).st_size
        except FileNotFoundError:
            raise IndexFault("the file is missing", name) from None
        if size != file.size:
            raise IndexFault(f"{size} bytes on disk, {file.size} were written", name)
        files[name] = file
    return files


def parse_tensors(index: Mapping[str, Any], files: Mapping[str, StoredFile]) -> dict[str, StoredTensor]:
    """Return the tensors in `index`.

    Raise IndexFault unless the pieces of each tensor tile it, and all pieces lie in `files` without overlap.
    """
    entries = index.get("tensors")
    if not isinstance(entries, dict):
        raise IndexFault("the index has no object `tensors`, so it lists no tensors")
    tensors = {name: _tensor(name, entry, files) for name, entry in entries.items()}
    positions: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (offset, bytes) of the pieces in each file
    for tensor in tensors.values():
        for piece in tensor.pieces:
            positions[piece.file].append((piece.offset, math.prod(piece.extent) * tensor.itemsize))
    for file, of_file in positions.items():
        of_file.sort()
        if any(offset + size > next_offset for (offset, size), (next_offset, _) in pairwise(of_file)):
            raise IndexFault(f"two pieces overlap in {file}")
    return tensors


def _tensor(name: str, entry: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    """Return the tensor `name` from its `entry` in the index; raise IndexFault unless its pieces tile it."""
    stored_dtype = entry.get("dtype") if isinstance(entry, dict) else None
    if not isinstance(stored_dtype, str) or stored_dtype not in _NAMES:
        raise IndexFault(f"{name!r} has an unknown dtype, {brief(stored_dtype)}")
    if not _are_sizes(entry.get("shape")):
        raise IndexFault(f"{name!r} has the shape {brief(entry.get('shape'))}, which must be a list of {_SIZES}")
    if math.prod(max(1, size) for size in entry["shape"]) > _MAX_SIZE:
        raise IndexFault(f"{name!r} has the shape {brief(entry['shape'])}, with more than {_MAX_SIZE} elements")
    shape, dtype = tuple(entry["shape"]), _NAMES[stored_dtype]
    items = _objects(f"pieces of {name!r}", entry.get("pieces"), {"file", "start", "extent", "offset", "crc32"})
    pieces = tuple(_piece(name, item, shape, ITEMSIZE[dtype], files) for item in items)
    problem = tiling_problem([(piece.start, piece.extent) for piece in pieces], shape)
    if problem:
        raise IndexFault(f"the pieces of {name!r} do not tile it: {problem}")
    return StoredTensor(dtype, shape, pieces)


def _piece(
    name: str, entry: Mapping[str, Any], shape: tuple[int, ...], itemsize: int, files: Mapping[str, StoredFile]
) -> StoredPiece:
    """Return a piece of the tensor `name` (of `shape`) from its `entry` in the index.

    Raise IndexFault unless the piece lies inside the tensor and inside one of `files`.
    """
    for key in ("start", "extent", "crc32"):
        if not _are_sizes(entry[key]):
            raise IndexFault(f"{name!r} has a piece with {key}={brief(entry[key])}, which must be a list of {_SIZES}")
    start, extent, sums = entry["start"], entry["extent"], entry["crc32"]
    if not len(start) == len(extent) == len(shape):
        raise IndexFault(f"{name!r} {shape} has a piece at {start} of shape {extent}, which differ in their dims")
    if any(low + count > size for low, count, size in zip(start, extent, shape)):
        raise IndexFault(f"{name!r} {shape} has a piece at {start} of shape {extent}, beyond the tensor's end")
    file = files.get(entry["file"]) if isinstance(entry["file"], str) else None
    if file is None:
        raise IndexFault(f"{name!r} has a piece in the file {brief(entry['file'])}, which the index does not list")
    nbytes, offset = math.prod(extent) * itemsize, entry["offset"]
    if not _are_sizes([offset]) or not file.header <= offset <= file.size - nbytes:
        raise IndexFault(
            f"{name!r} has a piece of {nbytes} bytes at offset {brief(offset)} of {entry['file']}, outside of the data "
            f"of that file, which are its bytes {file.header} to {file.size}"
        )
    rows = extent[0] if extent else 1
    expected = len(list(blocks(rows, nbytes // rows if rows else 0)))
    if len(sums) != expected:
        raise IndexFault(f"{name!r} has a piece with {len(sums)} checksums instead of {expected}, one for each block")
    return StoredPiece(entry["file"], tuple(start), tuple(extent), offset, tuple(sums))


def _objects(what: str, value: Any, keys: set[str]) -> list[dict[str, Any]]:
    """Return `value`, the `what` of the index; raise IndexFault unless it is a list of objects that all have `keys`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) and keys <= item.keys() for item in value):
        raise IndexFault(f"the {what} in the index are no list of objects, each with {', '.join(sorted(keys))}")
    return value


def _are_sizes(value: Any) -> bool:
    """Return True for a list of integers in [0, _MAX_SIZE)."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _MAX_SIZE for size in value)
