"""What a checkpoint's index says, checked: whoever wrote it, no byte outside of the named files is looked for."""

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
from kumi.files.untrusted import inside
from kumi.storage.write import DTYPES, ITEMSIZE, blocks, tiling_problem

if TYPE_CHECKING:
    import torch

_NAMES = {stored: name for name, stored in DTYPES.items()}
_MAX_SIZE = 2**60


@dataclass(frozen=True)
class StoredPiece:
    """Where a piece of a tensor lies: `offset` bytes into `file`, `sums` the CRC-32 of its blocks."""

    file: str
    start: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    sums: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor's dtype by torch's name of it, shape and pieces."""

    dtype_name: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype_name]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class StoredFile:
    """A shard: its size, and the length and CRC-32 of its header."""

    size: int
    header: int
    crc32: int


class IndexFault(ValueError):
    """What is wrong with an index; `file` is the one to blame, the index itself where it is empty."""

    def __init__(self, what: str, file: str = "") -> None:
        super().__init__(what)
        self.file = file


def checked_files(folder: Path, index: Mapping[str, Any]) -> dict[str, StoredFile]:
    """The shards that `index` names, once they are there and as large as it says; IndexFault otherwise."""
    files: dict[str, StoredFile] = {}
    for entry in _objects(index.get("files"), {"name", "size", "header", "crc32"}):
        name, file = entry["name"], StoredFile(entry["size"], entry["header"], entry["crc32"])
        if not isinstance(name, str) or name in files or not name.endswith(".safetensors"):
            raise IndexFault(f"the file {name!r} is named twice, or is no safetensors file")
        if not _sizes([file.size, file.header, file.crc32]) or file.header > file.size:
            raise IndexFault(f"{name} has {file.size!r} bytes, of which {file.header!r} are its header")
        try:
            found = os.stat(inside(folder, name, RefusedError)).st_size
        except FileNotFoundError:
            raise IndexFault("the file is missing", name) from None
        if found != file.size:
            raise IndexFault(f"{found} bytes on disk, {file.size} were written", name)
        files[name] = file
    return files


def checked_tensors(index: Mapping[str, Any], files: Mapping[str, StoredFile]) -> dict[str, StoredTensor]:
    """The tensors of `index`, once their pieces tile them, and lie in `files` without overlap; IndexFault otherwise."""
    entries = index.get("tensors")
    if not isinstance(entries, dict):
        raise IndexFault("it lists no tensors")
    tensors = {name: _tensor(name, entry, files) for name, entry in entries.items()}
    used: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors.values():
        for piece in tensor.pieces:
            used[piece.file].append((piece.offset, math.prod(piece.extent) * tensor.itemsize))
    for file, spans in used.items():
        spans.sort()
        if any(low + size > following for (low, size), (following, _) in pairwise(spans)):
            raise IndexFault(f"two pieces overlap in {file}")
    return tensors


def _tensor(name: str, entry: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in _NAMES:
        raise IndexFault(f"{name!r} has a dtype that checkpoints do not have")
    if not _sizes(entry.get("shape")) or math.prod(max(1, size) for size in entry["shape"]) > _MAX_SIZE:
        raise IndexFault(f"{name!r} has the shape {entry.get('shape')!r}")
    shape, dtype = tuple(entry["shape"]), _NAMES[entry["dtype"]]
    wanted = {"file", "start", "extent", "offset", "crc32"}
    pieces = tuple(_piece(name, one, shape, ITEMSIZE[dtype], files) for one in _objects(entry.get("pieces"), wanted))
    problem = tiling_problem([(piece.start, piece.extent) for piece in pieces], shape)
    if problem:
        raise IndexFault(f"the pieces of {name!r} do not tile it: {problem}")
    return StoredTensor(dtype, shape, pieces)


def _piece(
    name: str, entry: Mapping[str, Any], shape: tuple[int, ...], itemsize: int, files: Mapping[str, StoredFile]
) -> StoredPiece:
    start, extent, sums = entry["start"], entry["extent"], entry["crc32"]
    if not all(map(_sizes, (start, extent, sums))) or not len(start) == len(extent) == len(shape):
        raise IndexFault(f"{name!r} has a piece at {start!r} of {extent!r}")
    if any(low + count > whole for low, count, whole in zip(start, extent, shape)):
        raise IndexFault(f"{name!r} {shape} has a piece at {start} of {extent}, beyond its end")
    file = files.get(entry["file"]) if isinstance(entry["file"], str) else None
    size = math.prod(extent) * itemsize
    if file is None or not _sizes([entry["offset"]]) or not file.header <= entry["offset"] <= file.size - size:
        raise IndexFault(f"{name!r} has {size} bytes at {entry['offset']!r} of {entry['file']!r}, beyond its end")
    rows = extent[0] if extent else 1
    if len(sums) != len(list(blocks(rows, size // rows if rows else 0))):
        raise IndexFault(f"{name!r} has a piece with {len(sums)} checksums")
    return StoredPiece(entry["file"], tuple(start), tuple(extent), entry["offset"], tuple(sums))


def _objects(found: Any, keys: set[str]) -> list[dict[str, Any]]:
    """`found`, a list of objects that have these keys."""
    if not isinstance(found, list) or not all(isinstance(one, dict) and keys <= one.keys() for one in found):
        raise IndexFault(f"it has no list of objects with {', '.join(sorted(keys))}")
    return found


def _sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(size) is int and 0 <= size < _MAX_SIZE for size in found)
