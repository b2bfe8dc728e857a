"""Optimizer states in files on NVMe drives: read and written by element ranges, and mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kumi.errors import SaveError
from kumi.files.output import remove_file
from kumi.spec.optim_states import MOMENTS


@dataclass(frozen=True)
class NvmeStore:
    """A file for each of `MOMENTS`.

    `mapped`: the files mapped into memory, (elements,) each.
    `files`: their file descriptors.

    Mapped memory and the files are the same pages of the system's cache, so each shows writes to the other.
    """

    mapped: dict[str, Tensor]
    files: tuple[int, ...]

    def read(self, first: int, into: Sequence[Tensor]) -> None:
        """Fill each of `into` with elements of its file, beginning with element `first`."""
        for file, tensor in zip(self.files, into, strict=True):
            _transfer(os.preadv, file, tensor, first)

    def write(self, first: int, parts: Sequence[Tensor]) -> None:
        """Write each of `parts` to its file, beginning at element `first`."""
        for file, tensor in zip(self.files, parts, strict=True):
            _transfer(os.pwritev, file, tensor, first)


def open_nvme_store(folder: Path, rank: int, elements: int, dtype: torch.dtype) -> NvmeStore:
    """Return a store of `elements` zeros of `dtype` for each of `MOMENTS`, in `folder`.

    The files are unlinked at once, so they vanish with the process in any case. Raise SaveError if the folder cannot be
    written or has no room.
    """
    mapped, files = {}, []
    for name in MOMENTS:
        path = folder / f"rank-{rank:05d}.{name}"
        size = max(1, elements) * dtype.itemsize
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_file(path)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            # Allocate now: on a full drive, a write to mapped memory would kill the process.
            os.posix_fallocate(file, 0, size)
            mapped[name] = torch.from_file(str(path), shared=True, size=max(1, elements), dtype=dtype)
            os.unlink(path)
        except OSError as error:
            raise SaveError(
                f"{path}: cannot hold {size} bytes of optimizer states ({error.strerror or error}); make room, or name "
                f"another folder with train.offload_dir"
            ) from error
        files.append(file)
    return NvmeStore(mapped, tuple(files))


def _transfer(move: object, file: int, tensor: Tensor, first: int) -> None:
    """Read or write all bytes of `tensor` at element `first` of the file, by calls of `move`: os.preadv or os.pwritev.

    One call may move fewer bytes than it is given.
    """
    remaining = memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
    offset = first * tensor.itemsize
    while len(remaining):
        done = move(file, [remaining], offset)  # type: ignore[operator]
        if done == 0:
            raise OSError(f"a file of optimizer states ends early, at byte {offset}")
        remaining, offset = remaining[done:], offset + done
