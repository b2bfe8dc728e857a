"""Writing PyTorch's distributed checkpoints (DCP) a piece at a time: at no time is more than one piece in memory.

A file has archives as torch.save writes them, one behind the other; `.metadata`, written last, says where each is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kumi.storage.write import tiling_problem

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A rectangle of the tensor `name` of `shape`, from `start` on."""

    name: str
    shape: Shape
    start: Shape
    data: Tensor


def write(
    folder: Path, pieces: Iterable[Piece], objects: Iterable[tuple[str, Any]], *, file_bytes: int = 5 * 10**9
) -> None:
    """Write a checkpoint into `folder`, which exists and is empty, in files of about `file_bytes`.

    The pieces of a tensor must tile it. Objects that are equal, one after the other, are stored once.
    """
    described: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for name, index, info, one in _archives(folder, pieces, objects, file_bytes):
        where[index] = info
        if isinstance(one, Piece):
            _note(described, one)
        else:
            described[name] = BytesStorageMetadata()
    for name, tensor in described.items():
        if isinstance(tensor, TensorStorageMetadata):
            boxes = [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
            problem = tiling_problem(boxes, tensor.size)
            assert problem is None, f"the pieces of {name} do not tile it: {problem}"
    keys = {name: (name,) for name in described}
    content = Metadata(described, planner_data=keys, storage_data=where, storage_meta=StorageMeta(), version="1.0.0")
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(content, file)


def _archives(
    folder: Path, pieces: Iterable[Piece], objects: Iterable[tuple[str, Any]], file_bytes: int
) -> Iterator[tuple[str, MetadataIndex, _StorageInfo, Any]]:
    """Writes everything, and says of each where it is."""
    number, file = 0, (folder / "__0_0.distcp").open("wb")
    try:
        for piece in pieces:
            if file.tell() and file.tell() + piece.data.nbytes > file_bytes:
                file.close()
                number += 1
                file = (folder / f"__0_{number}.distcp").open("wb")
            start = file.tell()
            # What torch.save writes is the storage, not the view.
            data = piece.data if piece.data.untyped_storage().nbytes() == piece.data.nbytes else piece.data.clone()
            torch.save(data.contiguous(), file)
            info = _StorageInfo(f"__0_{number}.distcp", start, file.tell() - start)
            yield piece.name, MetadataIndex(piece.name, piece.start), info, piece
        last: tuple[Any, _StorageInfo] | None = None
        for name, content in objects:
            if last is None or last[0] is not content:
                start = file.tell()
                file.write(_saved(content))
                last = (content, _StorageInfo(f"__0_{number}.distcp", start, file.tell() - start))
            yield name, MetadataIndex(name), last[1], content
    finally:
        file.close()


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _note(described: dict[str, Any], piece: Piece) -> None:
    size = torch.Size(piece.shape)
    tensor = described.setdefault(piece.name, TensorStorageMetadata(TensorProperties(piece.data.dtype), size, []))
    kind = (tensor.properties.dtype, tensor.size)
    assert kind == (piece.data.dtype, size), f"{piece.name}: pieces differ in kind"
    tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.data.shape)))
