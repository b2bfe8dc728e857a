"""Optimizer states in files: read and written piece by piece, and mapped into memory for who needs them all."""

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
class Drives:
    """A file of the elements of each of `MOMENTS`: `mapped` into memory, (elements,), and its number `files`.

    What is written shows where it is mapped, and the other way round: both are the same pages of the system's cache.
    """

    mapped: dict[str, Tensor]
    files: tuple[int, ...]

    def read(self, first: int, into: Sequence[Tensor]) -> None:
        """Fills each of `into` with its file's elements from `first` on."""
        for file, tensor in zip(self.files, into, strict=True):
            _whole(os.preadv, file, tensor, first)

    def write(self, first: int, parts: Sequence[Tensor]) -> None:
        """Writes each of `parts` to its file from element `first` on."""
        for file, tensor in zip(self.files, parts, strict=True):
            _whole(os.pwritev, file, tensor, first)


def open_drives(folder: Path, rank: int, elements: int, dtype: torch.dtype) -> Drives:
    """Files of zeros for `elements` elements of `dtype` of each of `MOMENTS`, in `folder`.

    Their names are taken away at once, so that they are gone when the process is, whatever it dies of. Raises SaveError
    when the folder cannot be written or has no room.
    """
    mapped, files = {}, []
    for name in MOMENTS:
        path = folder / f"rank-{rank:05d}.{name}"
        size = max(1, elements) * dtype.itemsize
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_file(path)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.posix_fallocate(file, 0, size)  # now, for a full drive would end a process that writes to mapped memory
            mapped[name] = torch.from_file(str(path), shared=True, size=max(1, elements), dtype=dtype)
            os.unlink(path)
        except OSError as error:
            raise SaveError(
                f"{path}: cannot hold {size} bytes of optimizer states ({error.strerror or error}); make room, or name "
                f"another folder with train.offload_dir"
            ) from error
        files.append(file)
    return Drives(mapped, tuple(files))


def _whole(move: object, file: int, tensor: Tensor, first: int) -> None:
    """Moves all bytes of `tensor`, whose elements are `first` and those after it: one call may move fewer."""
    left = memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
    offset = first * tensor.itemsize
    while len(left):
        done = move(file, [left], offset)  # type: ignore[operator]
        if done == 0:
            raise OSError(f"a file of optimizer states ends at byte {offset}")
        left, offset = left[done:], offset + done
