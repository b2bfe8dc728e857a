"""Writing PyTorch's distributed checkpoints (DCP) a piece at a time: no thread has more than one piece in memory.

A file has archives as torch.save writes them, one behind the other; `.metadata`, written last, says where each is.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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


@dataclass(frozen=True)
class _Place:
    """Where something is in the folder."""

    name: str
    index: MetadataIndex
    info: _StorageInfo
    piece: Piece | None


def write(
    folder: Path,
    groups: Sequence[Iterable[Piece]],
    objects: Iterable[tuple[str, Any]],
    *,
    wrote: Callable[[int], None] = lambda _: None,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write a checkpoint into `folder`, which exists and is empty, in files of about `file_bytes`.

    Each of the `groups` is written at the same time as the others, into files of its own; the pieces of a tensor must
    tile it. Objects that are one and the same, one after the other, are stored once. `wrote` is called with the bytes
    of every piece, once it is written.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, len(groups))) as pool:
        jobs = [
            pool.submit(_pieces, folder, number, group, file_bytes, wrote, stop) for number, group in enumerate(groups)
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stop.set()
            raise
    places = [place for job in jobs for place in job.result()]
    places += _objects(folder / f"__{len(groups)}_0.distcp", objects)
    described = _described(places)
    for name, tensor in described.items():
        if isinstance(tensor, TensorStorageMetadata):
            boxes = [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
            problem = tiling_problem(boxes, tensor.size)
            assert problem is None, f"the pieces of {name} do not tile it: {problem}"
    content = Metadata(
        described,
        planner_data={name: (name,) for name in described},
        storage_data={place.index: place.info for place in places},
        storage_meta=StorageMeta(),
        version="1.0.0",
    )
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(content, file)


def _pieces(
    folder: Path, group: int, pieces: Iterable[Piece], limit: int, wrote: Callable[[int], None], stop: threading.Event
) -> list[_Place]:
    """Where the pieces of a group are, once they are written."""
    places: list[_Place] = []
    number, file = 0, (folder / f"__{group}_0.distcp").open("wb")
    try:
        for piece in pieces:
            if stop.is_set():
                break
            if file.tell() and file.tell() + piece.data.nbytes > limit:
                file.close()
                number += 1
                file = (folder / f"__{group}_{number}.distcp").open("wb")
            start, data = file.tell(), piece.data
            # What torch.save writes is the storage, not the view.
            torch.save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), file)
            info = _StorageInfo(f"__{group}_{number}.distcp", start, file.tell() - start)
            blank = Piece(piece.name, piece.shape, piece.start, data.to("meta"))
            places.append(_Place(piece.name, MetadataIndex(piece.name, piece.start), info, blank))
            wrote(data.nbytes)
            del piece, data
    finally:
        file.close()
    return places


def _objects(path: Path, objects: Iterable[tuple[str, Any]]) -> Iterator[_Place]:
    """Writes them, and says of each where it is."""
    last: tuple[Any, _StorageInfo] | None = None
    with path.open("wb") as file:
        for name, content in objects:
            if last is None or last[0] is not content:
                start = file.tell()
                file.write(_saved(content))
                last = (content, _StorageInfo(path.name, start, file.tell() - start))
            yield _Place(name, MetadataIndex(name), last[1], None)


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _described(places: Iterable[_Place]) -> dict[str, Any]:
    """What the metadata say of every tensor and object."""
    found: dict[str, Any] = {}
    for place in places:
        piece = place.piece
        if piece is None:
            found[place.name] = BytesStorageMetadata()
            continue
        size = torch.Size(piece.shape)
        tensor = found.setdefault(piece.name, TensorStorageMetadata(TensorProperties(piece.data.dtype), size, []))
        kind = (tensor.properties.dtype, tensor.size)
        assert kind == (piece.data.dtype, size), f"{piece.name}: pieces differ in kind"
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.data.shape)))
    return found
