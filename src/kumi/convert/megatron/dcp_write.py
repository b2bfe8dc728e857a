"""Write PyTorch's distributed checkpoints (DCP) one piece at a time: each thread holds at most one piece in memory.

A file is a sequence of torch.save archives; `.metadata`, written last, lists the file and offset of each.
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

from kumi.convert.files.slices import Dims
from kumi.storage.write import tiling_problem


@dataclass(frozen=True)
class ChunkData:
    """A slice of the tensor `name` (of shape `shape`), beginning at `start`."""

    name: str
    shape: Dims
    start: Dims
    data: Tensor


@dataclass(frozen=True)
class _Location:
    """The location of a piece (or of an object, where `piece` is None) in the folder."""

    name: str
    index: MetadataIndex
    info: _StorageInfo
    piece: ChunkData | None


def write_dcp(
    folder: Path,
    groups: Sequence[Iterable[ChunkData]],
    objects: Iterable[tuple[str, Any]],
    *,
    wrote: Callable[[int], None] = lambda _: None,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write a checkpoint into the empty folder `folder`, in files of about `file_bytes`.

    groups   pieces; each group is written by its own thread into its own files, and the pieces of a tensor must tile it
    objects  non-tensor state by name; consecutive entries that are the same object are stored once
    wrote    called with the number of bytes of each piece after it was written
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max(1, len(groups))) as pool:
        jobs = [
            pool.submit(_write_pieces, folder, number, group, file_bytes, wrote, stop)
            for number, group in enumerate(groups)
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stop.set()
            raise
    locations = [location for job in jobs for location in job.result()]
    locations += _write_objects(folder / f"__{len(groups)}_0.distcp", objects)
    entries = _metadata_entries(locations)
    for name, tensor in entries.items():
        if isinstance(tensor, TensorStorageMetadata):
            boxes = [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
            problem = tiling_problem(boxes, tensor.size)
            assert problem is None, f"the pieces of {name} do not tile it: {problem}"
    metadata = Metadata(
        entries,
        planner_data={name: (name,) for name in entries},
        storage_data={location.index: location.info for location in locations},
        storage_meta=StorageMeta(),
        version="1.0.0",
    )
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def _write_pieces(
    folder: Path,
    group: int,
    pieces: Iterable[ChunkData],
    limit: int,
    wrote: Callable[[int], None],
    stop: threading.Event,
) -> list[_Location]:
    """Write the pieces of a group; return their locations."""
    locations: list[_Location] = []
    file_number, file = 0, (folder / f"__{group}_0.distcp").open("wb")
    try:
        for piece in pieces:
            if stop.is_set():
                break
            if file.tell() and file.tell() + piece.data.nbytes > limit:
                file.close()
                file_number += 1
                file = (folder / f"__{group}_{file_number}.distcp").open("wb")
            start, data = file.tell(), piece.data
            # torch.save writes the entire storage of a view.
            torch.save(data if data.untyped_storage().nbytes() == data.nbytes else data.clone(), file)
            info = _StorageInfo(f"__{group}_{file_number}.distcp", start, file.tell() - start)
            blank = ChunkData(piece.name, piece.shape, piece.start, data.to("meta"))
            locations.append(_Location(piece.name, MetadataIndex(piece.name, piece.start), info, blank))
            wrote(data.nbytes)
            del piece, data
    finally:
        file.close()
    return locations


def _write_objects(path: Path, objects: Iterable[tuple[str, Any]]) -> Iterator[_Location]:
    """Write the objects into the file `path`; yield their locations."""
    last: tuple[Any, _StorageInfo] | None = None
    with path.open("wb") as file:
        for name, content in objects:
            if last is None or last[0] is not content:
                start = file.tell()
                file.write(_archive(content))
                last = (content, _StorageInfo(path.name, start, file.tell() - start))
            yield _Location(name, MetadataIndex(name), last[1], None)


def _archive(content: Any) -> bytes:
    """Return `content` as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _metadata_entries(locations: Iterable[_Location]) -> dict[str, Any]:
    """Return the entry in `.metadata` for every tensor and object, by name."""
    entries: dict[str, Any] = {}
    for location in locations:
        piece = location.piece
        if piece is None:
            entries[location.name] = BytesStorageMetadata()
            continue
        size = torch.Size(piece.shape)
        tensor = entries.setdefault(piece.name, TensorStorageMetadata(TensorProperties(piece.data.dtype), size, []))
        kind = (tensor.properties.dtype, tensor.size)
        assert kind == (piece.data.dtype, size), (
            f"{piece.name}: pieces differ in dtype or shape: {kind} and {(piece.data.dtype, size)}"
        )
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.data.shape)))
    return entries
