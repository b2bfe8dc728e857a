"""Parse and check a checkpoint's index. The index is untrusted: after the checks, reads stay inside its files."""

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
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype_name]

    @property
    def nbytes(self) -> int:
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
    for entry in _objects(index.get("files"), {"name", "size", "header", "crc32"}):
        name, file = entry["name"], StoredFile(entry["size"], entry["header"], entry["crc32"])
        if not isinstance(name, str) or name in files or not name.endswith(".safetensors"):
            raise IndexFault(f"the file {name!r} is listed twice or is not a safetensors file")
        if not _are_sizes([file.size, file.header, file.crc32]) or file.header > file.size:
            raise IndexFault(
                f"{name}: its size, header and crc32 ({file.size!r}, {file.header!r}, {file.crc32!r}) are not integers "
                f"from 0, or its header is longer than its size"
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
        raise IndexFault("it lists no tensors")
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
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _NAMES:
        raise IndexFault(f"{name!r} has an unknown dtype")
    if not _are_sizes(entry.get("shape")) or math.prod(max(1, size) for size in entry["shape"]) > _MAX_SIZE:
        raise IndexFault(
            f"{name!r} has the shape {entry.get('shape')!r}, not a list of sizes with a product below 2**60"
        )
    shape, dtype = tuple(entry["shape"]), _NAMES[entry["dtype"]]
    keys = {"file", "start", "extent", "offset", "crc32"}
    pieces = tuple(_piece(name, item, shape, ITEMSIZE[dtype], files) for item in _objects(entry.get("pieces"), keys))
    problem = tiling_problem([(piece.start, piece.extent) for piece in pieces], shape)
    if problem:
        raise IndexFault(f"the pieces of {name!r} do not tile it: {problem}")
    return StoredTensor(dtype, shape, pieces)


def _piece(
    name: str, entry: Mapping[str, Any], shape: tuple[int, ...], itemsize: int, files: Mapping[str, StoredFile]
) -> StoredPiece:
    start, extent, sums = entry["start"], entry["extent"], entry["crc32"]
    if not all(map(_are_sizes, (start, extent, sums))) or not len(start) == len(extent) == len(shape):
        raise IndexFault(
            f"{name!r} {shape} has a piece at {start!r} with the extent {extent!r} and the checksums {brief(sums)}: "
            f"each must be a list of integers from 0, and the first two have one for each dim"
        )
    if any(low + count > size for low, count, size in zip(start, extent, shape)):
        raise IndexFault(f"{name!r} {shape} has a piece at {start} of {extent}, beyond the end of the tensor in a dim")
    file = files.get(entry["file"]) if isinstance(entry["file"], str) else None
    nbytes = math.prod(extent) * itemsize
    if file is None or not _are_sizes([entry["offset"]]) or not file.header <= entry["offset"] <= file.size - nbytes:
        raise IndexFault(
            f"{name!r} has a piece of {nbytes} bytes at the offset {entry['offset']!r} of {entry['file']!r}: the index "
            f"lists no such file, or the offset is in the file's header, or the piece ends beyond the file"
        )
    rows = extent[0] if extent else 1
    if len(sums) != len(list(blocks(rows, nbytes // rows if rows else 0))):
        raise IndexFault(f"{name!r} has a piece with {len(sums)} checksums, not one for each of its blocks")
    return StoredPiece(entry["file"], tuple(start), tuple(extent), entry["offset"], tuple(sums))


def _objects(value: Any, keys: set[str]) -> list[dict[str, Any]]:
    """Return `value`; raise IndexFault unless it is a list of objects that all have `keys`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) and keys <= item.keys() for item in value):
        raise IndexFault(f"it has no list of objects with {', '.join(sorted(keys))}")
    return value


def _are_sizes(value: Any) -> bool:
    """Return True for a list of integers in [0, _MAX_SIZE)."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _MAX_SIZE for size in value)
