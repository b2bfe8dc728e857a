"""Reading PyTorch's distributed checkpoints (DCP) without trusting them: any rectangle of any tensor, from storage.

A folder has `.metadata`, a pickle that says of every piece of every tensor in which file it is, from which byte on and
how long; there it is an archive as torch.save writes it. Nothing of PyTorch's own loading is used: every name, offset,
length and shape is checked before a byte is read, and only the bytes asked for are.
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

from kumi.convert import pickles
from kumi.errors import RefusedError
from kumi.files.untrusted import inside, open_stream
from kumi.storage.write import tiling_problem

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Blob:
    """Bytes of a file of the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, and where it is."""

    start: Shape
    extent: Shape
    blob: Blob


@dataclass(frozen=True)
class Stored:
    """A tensor: its dtype, shape, and chunks, which tile it."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds: tensors, and other objects by name. `heads` remembers where chunks' data begin."""

    folder: Path
    tensors: Mapping[str, Stored]
    objects: Mapping[str, Blob]
    heads: dict[Blob, tuple[pickles.Head, int]] = field(default_factory=dict, repr=False, compare=False)

    def read(self, name: str, start: Shape, shape: Shape) -> Tensor:
        """The rectangle of the tensor `name` of `shape` from `start` on."""
        stored = self.tensors[name]
        out = torch.empty(shape, dtype=stored.dtype)
        for chunk in stored.chunks:
            low = tuple(map(max, chunk.start, start))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(chunk.start, chunk.extent, start, shape))
            if all(a < b for a, b in zip(low, high)):
                into = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, start))
                inner = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, chunk.start))
                out[into] = self._piece(name, stored.dtype, chunk, inner)
        return out

    def load(self, name: str) -> Any:
        """The object `name`, as far as it is made of plain things; of tensors in it only heads."""
        blob = self.objects[name]
        with self._open(blob) as file:
            return pickles.load_archive(_window(file, blob), f"{self.folder / blob.file}: {name!r}").content

    def _open(self, blob: Blob) -> BinaryIO:
        return open_stream(inside(self.folder, blob.file, RefusedError))

    def _piece(self, name: str, dtype: torch.dtype, chunk: Chunk, wanted: tuple[slice, ...]) -> Tensor:
        """The rectangle `wanted` of `chunk`; the bytes read are rows of its first dim of more than one."""
        with self._open(chunk.blob) as file:
            head, first = self._head(file, name, dtype, chunk)
            if not _is_contiguous(head):
                whole = _bytes(file, first, head.storage.count * dtype.itemsize).view(dtype)
                return whole.as_strided(head.shape, head.stride, head.offset)[wanted]
            lead = next((dim for dim, size in enumerate(head.shape) if size > 1), 0)
            if not head.shape:
                return _bytes(file, first + head.offset * dtype.itemsize, dtype.itemsize).view(dtype).view(())
            row = prod(head.shape[lead + 1 :])
            rows = wanted[lead]
            begin = first + (head.offset + rows.start * row) * dtype.itemsize
            data = _bytes(file, begin, (rows.stop - rows.start) * row * dtype.itemsize).view(dtype)
            shape = (*head.shape[:lead], rows.stop - rows.start, *head.shape[lead + 1 :])
            return data.view(shape)[(*wanted[:lead], slice(None), *wanted[lead + 1 :])]

    def _head(self, file: BinaryIO, name: str, dtype: torch.dtype, chunk: Chunk) -> tuple[pickles.Head, int]:
        """The head of a chunk and the byte of the file where its storage begins, checked."""
        if chunk.blob not in self.heads:
            self.heads[chunk.blob] = self._parsed(file, name, dtype, chunk)
        return self.heads[chunk.blob]

    def _parsed(self, file: BinaryIO, name: str, dtype: torch.dtype, chunk: Chunk) -> tuple[pickles.Head, int]:
        where = f"{self.folder / chunk.blob.file}: {name!r} at {chunk.start}"
        archive = pickles.load_archive(_window(file, chunk.blob), where)
        head = archive.content
        if not isinstance(head, pickles.Head) or head.storage.dtype != dtype or head.shape != chunk.extent:
            found = (head.storage.dtype, head.shape) if isinstance(head, pickles.Head) else type(head).__name__
            raise RefusedError(
                f"{where} is {found}, its metadata say {(dtype, chunk.extent)}; the files do not belong together"
            )
        record = archive.find(head.storage.record)
        size = head.storage.count * dtype.itemsize
        if record is None or record[1] != size or record[0] + size > chunk.blob.length or not _fits(head):
            raise RefusedError(f"{where}: its data do not lie inside of its file entry; copy the checkpoint again")
        return head, chunk.blob.offset + record[0]


def _fits(head: pickles.Head) -> bool:
    """True when `head` has a step for each dim, all whole numbers, that stay within its storage."""
    if len(head.stride) != len(head.shape) or not all(type(n) is int and n >= 0 for n in (*head.stride, head.offset)):
        return False
    reach = head.offset + sum((size - 1) * step for size, step in zip(head.shape, head.stride)) + 1
    return reach <= head.storage.count or 0 in head.shape


def _is_contiguous(head: pickles.Head) -> bool:
    expected = 1
    for size, step in zip(reversed(head.shape), reversed(head.stride)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _bytes(file: BinaryIO, offset: int, count: int) -> Tensor:
    """`count` bytes from `offset` on, as uint8."""
    buffer = torch.empty(count, dtype=torch.uint8)
    view = buffer.numpy().data
    while view:
        got = os.preadv(file.fileno(), [view], offset)
        if got == 0:
            raise RefusedError(f"{file.name}: ends before byte {offset + len(view)}; copy the checkpoint again")
        view, offset = view[got:], offset + got
    return buffer


class _Window(io.RawIOBase):
    """A part of a file, seen as a file."""

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
            raise ValueError(f"seeks before its beginning, to {base + offset}")
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
    """The checkpoint in `folder`, its metadata checked; RefusedError naming what is wrong."""
    found = pickles.load_metadata(folder / ".metadata")
    where, described = getattr(found, "storage_data", None), getattr(found, "state_dict_metadata", None)
    if not isinstance(where, dict) or not isinstance(described, dict):
        raise RefusedError(f"{folder / '.metadata'}: does not say where tensors are; copy the checkpoint again")
    sizes: dict[str, int] = {}
    tensors, objects = {}, {}
    for name, one in described.items():
        if isinstance(one, TensorStorageMetadata) and isinstance(name, str):
            tensors[name] = _tensor(folder, name, one, where, sizes)
        elif isinstance(one, BytesStorageMetadata) and isinstance(name, str):
            objects[name] = _blob(folder, name, where.get(MetadataIndex(name)), sizes)
        else:
            raise RefusedError(f"{folder / '.metadata'}: {name!r:.80} is neither a tensor nor an object")
    _check_apart(folder, tensors)
    return Checkpoint(folder, tensors, objects)


def _check_apart(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Nothing, or RefusedError where two pieces of tensors have bytes in common."""
    spans = sorted(
        (chunk.blob.file, chunk.blob.offset, chunk.blob.offset + chunk.blob.length, name)
        for name, stored in tensors.items()
        for chunk in stored.chunks
    )
    for (file, _, end, name), (other_file, begin, _, other) in pairwise(spans):
        if file == other_file and begin < end:
            raise RefusedError(
                f"{folder / file}: {name!r} and {other!r} are both said to have its byte {begin}; copy "
                f"the checkpoint again"
            )


def _tensor(
    folder: Path, name: str, one: TensorStorageMetadata, where: Mapping[Any, Any], sizes: dict[str, int]
) -> Stored:
    try:
        dtype, shape = one.properties.dtype, _shape(one.size)
        boxes = [(_shape(chunk.offsets), _shape(chunk.sizes)) for chunk in one.chunks]
    except (AttributeError, TypeError, ValueError) as error:
        raise RefusedError(f"{folder / '.metadata'}: {name!r} is not described as a tensor ({error})") from None
    problem = "dims differ" if any(len(start) != len(shape) for start, _ in boxes) else tiling_problem(boxes, shape)
    if problem or not isinstance(dtype, torch.dtype):
        raise RefusedError(
            f"{folder}: the pieces of {name!r} {shape} do not make it whole: {problem or dtype}; the "
            f"checkpoint is incomplete or damaged"
        )
    chunks = tuple(
        Chunk(start, extent, _blob(folder, name, where.get(MetadataIndex(name, start)), sizes))
        for start, extent in boxes
    )
    return Stored(dtype, shape, chunks)


def _shape(found: Any) -> Shape:
    shape = tuple(found)
    if any(type(n) is not int or not 0 <= n < 2**60 for n in shape) or len(shape) > 8:
        raise ValueError(f"{shape!r:.80} is no shape")
    return shape


def _blob(folder: Path, name: str, info: Any, sizes: dict[str, int]) -> Blob:
    """Where `name` is, by its entry `info` of the metadata: in a file of the folder, and inside of it."""
    file, offset, length = (getattr(info, key, None) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise RefusedError(f"{folder / '.metadata'}: says not where {name!r} is ({info!r:.120}); copy it again")
    if getattr(info, "transform_descriptors", None):
        raise RefusedError(f"{folder}: {name!r} is compressed ({info.transform_descriptors}); save it uncompressed")
    if file not in sizes:
        path = inside(folder, file, RefusedError)
        if not path.is_file():
            raise RefusedError(f"{folder / file}: the file is missing, and {name!r} in it; copy the checkpoint again")
        sizes[file] = path.stat().st_size
    if offset + length > sizes[file]:
        raise RefusedError(
            f"{folder / file}: has {sizes[file]} bytes, but {name!r} reaches to {offset + length}; the "
            f"file is truncated"
        )
    return Blob(file, offset, length)
