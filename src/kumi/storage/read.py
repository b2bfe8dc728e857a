"""Open a checkpoint and read rectangular slices of its tensors; each byte is verified against its checksum.

A read needs the memory of its destination and of one block (`kumi.storage.write.block_rows`). Any layout can read a
checkpoint that any other layout wrote.
"""

from __future__ import annotations

import difflib
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.errors import RefusedError
from kumi.files.untrusted import inside, open_regular
from kumi.paths import shown_path
from kumi.storage.folders import list_complete
from kumi.storage.index import IndexFault, StoredFile, StoredPiece, StoredTensor, parse_files, parse_tensors
from kumi.storage.write import FORMAT, as_bytes, block_rows, blocks, read_sealed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `meta` as saved, and tensors that are read on demand."""

    folder: Path
    meta: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    _verified_headers: set[str] = field(default_factory=set, repr=False, compare=False)

    def difference(self, shapes: Mapping[str, Sequence[int]], prefix: str = "") -> str | None:
        """Return how the tensors whose names begin with `prefix` differ from a model's, with the global `shapes`.

        Return None when there is no difference. Call this before reading slices into a model: `read_into` accepts any
        slice inside the stored tensor and would crop a larger tensor.
        """
        stored = {name: tensor.shape for name, tensor in self.tensors.items() if name.startswith(prefix)}
        for name in dict.fromkeys([*shapes, *stored]):
            on_disk, in_model = (str(tuple(table[name])) if name in table else "missing" for table in (stored, shapes))
            if on_disk != in_model:
                return f"{name!r} is {on_disk} in the checkpoint, {in_model} in the model"
        return None

    def _entry(self, name: str) -> StoredTensor:
        """Return the tensor `name`; raise RefusedError if there is none."""
        tensor = self.tensors.get(name)
        if tensor is None:
            similar = difflib.get_close_matches(name, self.tensors, n=1)
            hint = f"; the nearest name is {similar[0]!r}" if similar else ""
            raise RefusedError(
                f"{self.folder}: {name!r} is not among the checkpoint's {len(self.tensors)} tensors{hint}"
            )
        return tensor

    def read(self, name: str, start: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return the slice of tensor `name` with `shape` at `start`, on the CPU; by default all of it from `start`."""
        import torch

        tensor = self._entry(name)
        start = tuple(start) if start is not None else (0,) * len(tensor.shape)
        shape = tuple(shape) if shape is not None else tuple(size - low for low, size in zip(start, tensor.shape))
        out = torch.empty(shape, dtype=tensor.dtype)
        self.read_into(out, name, start)
        return out

    def read_into(self, out: torch.Tensor, name: str, start: Sequence[int]) -> None:
        """Fill `out` (any dtype, strides and device) with the slice of tensor `name` at `start`.

        Raise RefusedError when the checkpoint has no such tensor or slice, or when its bytes are damaged.
        """
        tensor, start, dims = self._entry(name), tuple(start), len(start)
        fits = all(low >= 0 and low + count <= size for low, count, size in zip(start, out.shape, tensor.shape))
        if not (dims == len(tensor.shape) == out.dim() and fits):
            slice_ = f"{tuple(out.shape)} at {start}"
            raise RefusedError(f"{self.folder}: {name!r} is {tensor.shape} on disk and has no slice {slice_}")
        if not tensor.shape:
            out, start = out.view(1), (0,)
        for piece in tensor.pieces:
            self._copy(name, tensor, piece, out, start)

    def block_end(self, name: str, row: int) -> int:
        """Return the row, exclusive, at which the block that has row `row` of tensor `name` ends.

        A checksum covers a block, so a reader that stops at block ends verifies each block once.
        """
        for piece in self._entry(name).pieces:
            if piece.start and piece.start[0] <= row < piece.start[0] + piece.extent[0]:
                step = block_rows(math.prod(piece.extent[1:]) * self._entry(name).itemsize)
                end = ((row - piece.start[0]) // step + 1) * step
                return piece.start[0] + min(piece.extent[0], end)
        return row + 1

    def verify(self) -> None:
        """Raise RefusedError unless all tensors in all shards match their checksums."""
        import torch

        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                row_shape = piece.extent[1:]
                step = max((high - low for low, high in _blocks(piece, tensor)), default=0)
                buffer = torch.empty((step, *row_shape), dtype=tensor.dtype)
                with self.opened(piece.file) as handle:
                    for index, (low, high) in enumerate(_blocks(piece, tensor)):
                        self._load_block(handle, name, piece, index, low, buffer[: high - low])

    def blocks(self, name: str, piece: StoredPiece) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the file, bytes, CRC-32) of each block of `piece`, a piece of tensor `name`."""
        row_bytes = math.prod(piece.extent[1:]) * self._entry(name).itemsize
        for (low, high), crc32 in zip(_blocks(piece, self._entry(name)), piece.sums, strict=True):
            yield piece.offset + low * row_bytes, (high - low) * row_bytes, crc32

    def _copy(
        self, name: str, tensor: StoredTensor, piece: StoredPiece, out: torch.Tensor, start: tuple[int, ...]
    ) -> None:
        """Copy the intersection of `piece` and `out` into `out`, whose first element has the global index `start`."""
        import torch

        dtype = tensor.dtype
        origin, extent = piece.start or (0,), piece.extent or (1,)
        low = [max(a, b) for a, b in zip(origin, start)]
        high = [min(a + n, b + m) for a, n, b, m in zip(origin, extent, start, out.shape)]
        if any(a >= b for a, b in zip(low, high)):
            return
        inner_piece = tuple(slice(a - o, b - o) for a, b, o in zip(low[1:], high[1:], origin[1:]))
        inner_out = tuple(slice(a - o, b - o) for a, b, o in zip(low[1:], high[1:], start[1:]))
        full_rows = all(b - a == n == m for a, b, n, m in zip(low[1:], high[1:], extent[1:], out.shape[1:]))
        # Blocks are read into `out` itself where possible, else into a buffer.
        direct = full_rows and out.is_contiguous() and out.dtype == dtype and out.device.type == "cpu"
        buffer = torch.empty(0, dtype=dtype)
        with self.opened(piece.file) as handle:
            for index, (row, end) in enumerate(_blocks(piece, tensor)):
                first, last = max(row + origin[0], low[0]), min(end + origin[0], high[0])
                if first >= last:
                    continue
                target = out[first - start[0] : last - start[0]]
                if direct and last - first == end - row:
                    self._load_block(handle, name, piece, index, row, target)
                    continue
                if buffer.numel() < (end - row) * math.prod(extent[1:]):
                    buffer = torch.empty((end - row, *extent[1:]), dtype=dtype)
                self._load_block(handle, name, piece, index, row, buffer[: end - row])
                target[(slice(None), *inner_out)].copy_(
                    buffer[(slice(first - origin[0] - row, last - origin[0] - row), *inner_piece)]
                )

    def _load_block(
        self, handle: int, name: str, piece: StoredPiece, index: int, row: int, target: torch.Tensor
    ) -> None:
        """Fill `target` (contiguous) with block `index` of `piece`, from the piece's row `row` on, and verify it."""
        view = as_bytes(target)
        row_bytes = len(view) // target.shape[0] if target.shape[0] else 0
        _read_all(handle, view, piece.offset + row * row_bytes)
        self.compare(piece.file, repr(name), zlib.crc32(view), piece.sums[index])

    @contextmanager
    def opened(self, file: str) -> Iterator[int]:
        """Open the shard `file`, verify its header once, and yield a file descriptor."""
        try:
            handle = open_regular(inside(self.folder, file, RefusedError))
        except OSError as error:
            raise damaged(self.folder, file, error.strerror or str(error)) from None
        try:
            self._verify_header(handle, file)
            yield handle
        finally:
            os.close(handle)

    def _verify_header(self, handle: int, file: str) -> None:
        """Raise RefusedError unless the header of the shard `file` matches its checksum; each header is read once."""
        if file in self._verified_headers:
            return
        header = memoryview(bytearray(self.files[file].header))
        _read_all(handle, header, 0)
        self.compare(file, "its header", zlib.crc32(header), self.files[file].crc32)
        self._verified_headers.add(file)

    def compare(self, file: str, part: str, actual: int, written: int) -> None:
        """Raise RefusedError unless the CRC-32 `actual` of `part` of the shard `file` equals `written`."""
        if actual != written:
            raise damaged(self.folder, file, f"the checksum of {part} is {actual:08x}, {written:08x} was written")


def _blocks(piece: StoredPiece, tensor: StoredTensor) -> list[tuple[int, int]]:
    """Return the rows (low, high) of each block of `piece`."""
    rows = piece.extent[0] if piece.extent else 1
    return list(blocks(rows, math.prod(piece.extent[1:]) * tensor.itemsize))


def open(folder: Path | str) -> Checkpoint:
    """Return the checkpoint in `folder` after verifying its index, its meta and the sizes of its files.

    Tensors are verified when they are read. Raise RefusedError with the faulty file and the remedy.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RefusedError(f"{shown_path(folder)}: no such checkpoint folder")
    index = _read_json(folder, "index.json")
    if index.get("format") != FORMAT:
        raise RefusedError(
            f"{folder}: this kumi reads checkpoint format {FORMAT}, not {index.get('format')!r}; use the version of "
            "kumi that wrote it"
        )
    try:
        files = parse_files(folder, index)
        tensors = parse_tensors(index, files)
    except IndexFault as fault:
        raise damaged(folder, fault.file or "index.json", str(fault)) from None
    meta = _read_json(folder, "meta.json").get("meta")
    if not isinstance(meta, dict):
        raise damaged(folder, "meta.json", "its `meta` is not a JSON object")
    return Checkpoint(folder, meta, tensors, files)


def damaged(folder: Path, file: str, reason: str) -> RefusedError:
    """Return the error for a damaged `file`; its remedy names the earlier checkpoint to continue from."""
    complete = [other.name for other in list_complete(folder.parent)]
    earlier = complete[: complete.index(folder.name)] if folder.name in complete else []
    remedy = f"to continue from {earlier[-1]}" if earlier else "to start anew (there is no earlier one)"
    return RefusedError(f"{folder / file}: the checkpoint is damaged: {reason}; delete the folder {folder} {remedy}")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON of the file `name`, without its checksum. Raise RefusedError if it is missing or damaged."""
    try:
        return read_sealed(inside(folder, name, RefusedError))
    except FileNotFoundError as error:
        raise damaged(folder, name, "the file is missing") from error
    except (OSError, ValueError) as error:
        raise damaged(folder, name, str(error)) from error


def _read_all(handle: int, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes of the file, beginning at byte `offset`.

    At the end of the file the rest of `view` stays unchanged; the caller's checksum detects it.
    """
    while view:
        count = os.preadv(handle, [view], offset)
        if count == 0:
            return
        view, offset = view[count:], offset + count
