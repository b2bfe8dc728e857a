"""Read PyTorch's distributed checkpoints (DCP) without trusting them: any slice of any tensor, from storage.

The pickle `.metadata` lists the file, offset and length of every chunk of every tensor; a chunk is an archive that
torch.save wrote. PyTorch's own loader is not used: names, offsets, lengths and shapes are checked before any byte is
read, and only the requested bytes are read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from kumi.convert.files.slices import Dims
from kumi.convert.megatron import pickles
from kumi.errors import RefusedError
from kumi.files.untrusted import inside, open_stream
from kumi.storage.write import tiling_problem


@dataclass(frozen=True)
class Blob:
    """A range of bytes of a file in the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A slice of a tensor, from `start` with the shape `extent`, and its bytes."""

    start: Dims
    extent: Dims
    blob: Blob


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor: dtype, shape, and the chunks that tile it."""

    dtype: torch.dtype
    shape: Dims
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its tensors, and its other objects by name.

    `heads` caches each chunk's parsed head, which is its tensor without the data, and the file offset of the data.
    """

    folder: Path
    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, Blob]
    heads: dict[Blob, tuple[pickles.Head, int]] = field(default_factory=dict, repr=False, compare=False)

    def read(self, name: str, start: Dims, shape: Dims) -> Tensor:
        """Return the slice of the tensor `name` that begins at `start` and has the shape `shape`."""
        stored = self.tensors[name]
        out = torch.empty(shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            low = tuple(map(max, chunk.start, start))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(chunk.start, chunk.extent, start, shape))
            if all(a < b for a, b in zip(low, high)):
                target = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, start))
                source = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, chunk.start))
                out[target] = self._read_chunk(name, stored.dtype, chunk, source)
        return out

    def load(self, name: str) -> Any:
        """Return the object `name`, limited to plain Python types; tensors in it are heads without data."""
        blob = self.objects[name]
        with self._open(blob) as file:
            return pickles.load_archive(_window(file, blob), f"{self.folder / blob.file}: {name!r}").content

    def _open(self, blob: Blob) -> BinaryIO:
        return open_stream(inside(self.folder, blob.file, RefusedError))

    def _read_chunk(self, name: str, dtype: torch.dtype, chunk: Chunk, region: tuple[slice, ...]) -> Tensor:
        """Return the slice `region` of `chunk`.

        Of a contiguous chunk only the needed rows of its first dim larger than 1 are read.
        """
        with self._open(chunk.blob) as file:
            head, first = self._head(file, name, dtype, chunk)
            if not _is_contiguous(head):
                storage = _read_bytes(file, first, head.storage.count * dtype.itemsize).view(dtype)
                return storage.as_strided(head.shape, head.stride, head.offset)[region]
            row_dim = next((dim for dim, size in enumerate(head.shape) if size > 1), 0)
            if not head.shape:
                return _read_bytes(file, first + head.offset * dtype.itemsize, dtype.itemsize).view(dtype).view(())
            row_numel = prod(head.shape[row_dim + 1 :])
            rows = region[row_dim]
            offset = first + (head.offset + rows.start * row_numel) * dtype.itemsize
            data = _read_bytes(file, offset, (rows.stop - rows.start) * row_numel * dtype.itemsize).view(dtype)
            shape = (*head.shape[:row_dim], rows.stop - rows.start, *head.shape[row_dim + 1 :])
            return data.view(shape)[(*region[:row_dim], slice(None), *region[row_dim + 1 :])]

    def _head(self, file: BinaryIO, name: str, dtype: torch.dtype, chunk: Chunk) -> tuple[pickles.Head, int]:
        """Return the chunk's head and the file offset of its storage, checked."""
        if chunk.blob not in self.heads:
            self.heads[chunk.blob] = self._parse_head(file, name, dtype, chunk)
        return self.heads[chunk.blob]

    def _parse_head(self, file: BinaryIO, name: str, dtype: torch.dtype, chunk: Chunk) -> tuple[pickles.Head, int]:
        """Parse the chunk's archive; raise RefusedError unless it agrees with `.metadata` and fits its byte range."""
        where = f"{self.folder / chunk.blob.file}: {name!r} at {chunk.start}"
        archive = pickles.load_archive(_window(file, chunk.blob), where)
        head = archive.content
        if not isinstance(head, pickles.Head) or head.storage.dtype != dtype or head.shape != chunk.extent:
            actual = (head.storage.dtype, head.shape) if isinstance(head, pickles.Head) else type(head).__name__
            raise RefusedError(
                f"{where} is {actual}, but .metadata says {(dtype, chunk.extent)}; the files do not belong together"
            )
        record = archive.find(head.storage.record)
        size = head.storage.count * dtype.itemsize
        if record is None or record[1] != size or record[0] + size > chunk.blob.length or not _fits(head):
            raise RefusedError(f"{where}: its data reach beyond its entry in the file; copy the checkpoint again")
        return head, chunk.blob.offset + record[0]


def _fits(head: pickles.Head) -> bool:
    """True if `head` has a non-negative integer stride per dim and its elements stay inside its storage."""
    if len(head.stride) != len(head.shape) or not all(type(n) is int and n >= 0 for n in (*head.stride, head.offset)):
        return False
    reach = head.offset + sum((size - 1) * step for size, step in zip(head.shape, head.stride)) + 1
    return reach <= head.storage.count or 0 in head.shape


def _is_contiguous(head: pickles.Head) -> bool:
    """True if the elements of `head` are row-major without gaps."""
    expected = 1
    for size, step in zip(reversed(head.shape), reversed(head.stride)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _read_bytes(file: BinaryIO, offset: int, count: int) -> Tensor:
    """Return `count` bytes of `file` from `offset` on, as a uint8 tensor."""
    buffer = torch.empty(count, dtype=torch.uint8)
    view = buffer.numpy().data
    while view:
        count_read = os.preadv(file.fileno(), [view], offset)
        if count_read == 0:
            raise RefusedError(f"{file.name}: ends before byte {offset + len(view)}; copy the checkpoint again")
        view, offset = view[count_read:], offset + count_read
    return buffer


class _Window(io.RawIOBase):
    """A read-only file object over the bytes of a blob."""

    def __init__(self, file: BinaryIO, blob: Blob) -> None:
        super().__init__()
        self._file, self._blob, self._at = file, blob, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.length}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}, before the beginning of the entry")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._blob.length - self._at))
        data = os.pread(self._file.fileno(), count, self._blob.offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _window(file: BinaryIO, blob: Blob) -> BinaryIO:
    return io.BufferedReader(_Window(file, blob), 4096)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in `folder`; raise RefusedError naming the problem unless its metadata are consistent."""
    metadata = pickles.load_metadata(folder / ".metadata")
    storage, entries = getattr(metadata, "storage_data", None), getattr(metadata, "state_dict_metadata", None)
    if not isinstance(storage, dict) or not isinstance(entries, dict):
        raise RefusedError(f"{folder / '.metadata'}: lacks the storage locations of tensors; copy the checkpoint again")
    sizes: dict[str, int] = {}
    tensors, objects = {}, {}
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata) and isinstance(name, str):
            tensors[name] = _tensor(folder, name, entry, storage, sizes)
        elif isinstance(entry, BytesStorageMetadata) and isinstance(name, str):
            objects[name] = _blob(folder, name, storage.get(MetadataIndex(name)), sizes)
        else:
            raise RefusedError(
                f"{folder / '.metadata'}: {name!r:.80} is neither a tensor nor an object; copy the checkpoint again"
            )
    _check_disjoint(folder, tensors)
    return Checkpoint(folder, tensors, objects)


def _check_disjoint(folder: Path, tensors: Mapping[str, ChunkedTensor]) -> None:
    """Raise RefusedError if two chunks share bytes."""
    spans = sorted(
        (chunk.blob.file, chunk.blob.offset, chunk.blob.offset + chunk.blob.length, name)
        for name, stored in tensors.items()
        for chunk in stored.chunks
    )
    for (file, _, end, name), (other_file, begin, _, other) in pairwise(spans):
        if file == other_file and begin < end:
            raise RefusedError(
                f"{folder / file}: {name!r} and {other!r} overlap at byte {begin}, according to "
                f".metadata; copy the checkpoint again"
            )


def _tensor(
    folder: Path, name: str, entry: TensorStorageMetadata, storage: Mapping[Any, Any], sizes: dict[str, int]
) -> ChunkedTensor:
    """Return the tensor `name` from its metadata; raise RefusedError unless its chunks tile it."""
    try:
        dtype, shape = entry.properties.dtype, _shape(entry.size)
        boxes = [(_shape(chunk.offsets), _shape(chunk.sizes)) for chunk in entry.chunks]
    except (AttributeError, TypeError, ValueError) as error:
        raise RefusedError(
            f"{folder / '.metadata'}: {name!r} has a malformed tensor description ({error}); copy the checkpoint again"
        ) from None
    if not isinstance(dtype, torch.dtype):
        raise RefusedError(
            f"{folder / '.metadata'}: {name!r} has {dtype!r:.80} as its dtype, which is no torch.dtype; copy the "
            f"checkpoint again"
        )
    problem = "dims differ" if any(len(start) != len(shape) for start, _ in boxes) else tiling_problem(boxes, shape)
    if problem:
        raise RefusedError(
            f"{folder}: the chunks of {name!r} {shape} do not tile it ({problem}), because the checkpoint is "
            f"incomplete or damaged; copy it again"
        )
    chunks = tuple(
        Chunk(start, extent, _blob(folder, name, storage.get(MetadataIndex(name, start)), sizes))
        for start, extent in boxes
    )
    return ChunkedTensor(dtype, shape, chunks)


def _shape(dims: Any) -> Dims:
    """Return `dims` as a tuple; raise ValueError unless they are a valid shape."""
    shape = tuple(dims)
    if any(type(n) is not int or not 0 <= n < 2**60 for n in shape) or len(shape) > 8:
        raise ValueError(f"{shape!r:.80} is not a shape")
    return shape


def _blob(folder: Path, name: str, info: Any, sizes: dict[str, int]) -> Blob:
    """Return where the bytes of `name` are, from its metadata entry `info`.

    `sizes` caches the sizes of files. Raise RefusedError unless the bytes lie inside a file of the folder.
    """
    file, offset, length = (getattr(info, key, None) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise RefusedError(
            f"{folder / '.metadata'}: lacks the location of {name!r} ({info!r:.120}); copy the checkpoint again"
        )
    if getattr(info, "transform_descriptors", None):
        raise RefusedError(f"{folder}: {name!r} is compressed ({info.transform_descriptors}); save it uncompressed")
    if file not in sizes:
        path = inside(folder, file, RefusedError)
        if not path.is_file():
            raise RefusedError(f"{folder / file}: is missing, and {name!r} with it; copy the checkpoint again")
        sizes[file] = path.stat().st_size
    if offset + length > sizes[file]:
        raise RefusedError(
            f"{folder / file}: has {sizes[file]} bytes, but {name!r} ends at byte {offset + length}, so the "
            f"file is truncated; copy it again"
        )
    return Blob(file, offset, length)
