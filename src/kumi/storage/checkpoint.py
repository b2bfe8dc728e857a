"""Save and open checkpoints, made of safetensors and JSON files without pickle; save in the background.

This module is the public interface of three others: `write` (shards, index, commit), `read` (open, verify, slices)
and `folders` (listing, rotation, free space).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.accelerator import is_gpu
from kumi.errors import KumiError, SaveError
from kumi.storage.folders import (
    check_free_space,
    clean,
    latest,
    list_complete,
    rotate,
    step_folder,
    step_of,
    temporary_folder,
)
from kumi.storage.index import StoredTensor
from kumi.storage.read import Checkpoint, open
from kumi.storage.write import Piece, commit, write_pieces, write_sealed

if TYPE_CHECKING:
    import torch

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "Piece",
    "StoredTensor",
    "check_free_space",
    "clean",
    "commit",
    "latest",
    "list_complete",
    "open",
    "rotate",
    "save",
    "step_folder",
    "step_of",
    "temporary_folder",
    "write_pieces",
]


def save(
    folder: Path | str,
    pieces: Sequence[Piece],
    meta: Mapping[str, Any],
    *,
    rank: int = 0,
    ranks: int = 1,
    attempt: str = "",
    timeout: float = 600.0,
    keep: int | None = None,
    protect: Sequence[Path | str] = (),
) -> None:
    """Write this rank's pieces to disk; on rank 0 also wait for the other ranks and commit the checkpoint `folder`.

    Every rank calls this function, with the same `attempt`, a text that identifies the launch. Rank 0 polls the folder
    for up to `timeout` seconds and uses no collective. It removes leftovers of dead processes first, and afterwards,
    unless `keep` is None, all but the newest `keep` checkpoints and those in `protect`. Raise SaveError when a file
    cannot be written or a rank is missing.
    """
    folder = Path(folder)
    temporary = temporary_folder(folder)
    try:
        if rank == 0:
            clean(folder.parent, before=step_of(folder))
        write_pieces(temporary, rank, pieces, attempt=attempt)
        if rank == 0:
            commit(temporary, folder, meta, ranks=ranks, attempt=attempt, timeout=timeout)
            if keep is not None:
                rotate(folder.parent, keep, protect)
    except OSError as error:
        raise SaveError(f"{folder}: the checkpoint cannot be written: {error}") from error


# How long to wait after an allocation of pinned memory, as a multiple of the time that the allocation took.
_PAUSE = 4.0


class AsyncSaver:
    """Background saver: copies the pieces to host memory and writes them in a thread, one checkpoint at a time.

    `save` returns once the copy is complete, so training may change the tensors at once. The host buffers are reused
    and need the memory of one checkpoint's pieces. An error in the thread is raised by the next `save` or `wait`. Call
    `wait` before the process ends; otherwise the last checkpoint stays uncommitted and no reader lists it.
    """

    def __init__(self, *, rank: int = 0, ranks: int = 1, attempt: str = "", timeout: float = 600.0) -> None:
        self._rank, self._ranks, self._attempt, self._timeout = rank, ranks, attempt, timeout
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._reserving: threading.Thread | None = None
        self._hurry = threading.Event()  # ends the pauses of `_allocate`, because a save waits for it
        self._error: BaseException | None = None

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Allocate the pinned host memory for pieces like `pieces` on a GPU, in the background.

        A host allocates some 2 GB of pinned memory a second (6 GB in 3.3 s beside an H100); at the first save, this
        would stop training. During an allocation, the GPU's driver starts no kernel. The thread therefore pauses after
        each piece, so that training can queue kernels, with which the GPU is busy during the next allocation.
        """
        shapes = [
            ((piece.name, piece.start), piece.data.shape, piece.data.dtype)
            for piece in pieces
            if is_gpu(piece.data.device)
        ]
        if shapes:
            self._hurry.clear()
            self._reserving = threading.Thread(target=self._allocate, args=(shapes,), name="kumi-reserve", daemon=True)
            self._reserving.start()

    def _allocate(self, shapes: Sequence[tuple[tuple[str, tuple[int, ...]], Any, Any]]) -> None:
        """Allocate a buffer for each of `shapes`: the name and start of a piece, its shape and its dtype."""
        import torch

        # Memory that the host lacks is for the first save to report.
        with contextlib.suppress(RuntimeError):
            for key, shape, dtype in shapes:
                began = time.perf_counter()
                self._buffers[key] = torch.empty(shape, dtype=dtype, pin_memory=True)
                self._hurry.wait(_PAUSE * (time.perf_counter() - began))

    def save(
        self,
        folder: Path | str,
        pieces: Sequence[Piece],
        meta: Mapping[str, Any],
        *,
        keep: int | None = None,
        protect: Sequence[Path | str] = (),
    ) -> None:
        """Wait for the previous save, copy `pieces` to host memory, and start to write them in the background.

        Raise SaveError when the previous save failed.
        """
        self.wait()
        meta_copy = json.loads(json.dumps(meta))
        copies = self._snapshot(pieces)
        options = {
            "rank": self._rank,
            "ranks": self._ranks,
            "attempt": self._attempt,
            "timeout": self._timeout,
            "keep": keep,
            "protect": tuple(protect),
        }
        # A daemon thread does not delay the exit of a failing process. Readers ignore the uncommitted checkpoint.
        self._thread = threading.Thread(
            target=self._run, args=(Path(folder), copies, meta_copy, options), name="kumi-save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in progress ends. Raise SaveError (exit code 8) when it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise SaveError if a save has failed; do not wait for one in progress."""
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, KumiError):
                raise error
            raise SaveError(f"the checkpoint could not be written: {type(error).__name__}: {error}") from error

    @property
    def busy(self) -> bool:
        """True while a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def reserving(self) -> bool:
        """True while host memory is allocated."""
        return self._reserving is not None and self._reserving.is_alive()

    def _snapshot(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return copies of `pieces` in host memory, in pinned buffers where the data is on a GPU."""
        import torch

        if self._reserving is not None:
            self._hurry.set()
            self._reserving.join()
            self._reserving = None
        copies, device = [], None
        buffers = {}
        for piece in pieces:
            key, data = (piece.name, piece.start), piece.data.detach()
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
                buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=is_gpu(data.device))
            buffer.copy_(data, non_blocking=is_gpu(data.device))
            device = data.device if is_gpu(data.device) else device
            buffers[key] = buffer
            copies.append(piece._replace(data=buffer))
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = buffers
        return copies

    def _run(self, folder: Path, copies: list[Piece], meta: dict[str, Any], options: dict[str, Any]) -> None:
        """Save in the thread. Keep an error for `check`, and report it to rank 0."""
        try:
            save(folder, copies, meta, **options)
        except BaseException as error:
            self._error = error
            self._report_to_rank_0(folder, error)

    def _report_to_rank_0(self, folder: Path, error: BaseException) -> None:
        """Write the error to a file that rank 0 polls, so that rank 0 does not wait until its timeout."""
        note = temporary_folder(folder) / f"failed_{self._rank:05d}.json"
        # On a full disk this write may fail as well. Rank 0 then waits until its timeout.
        with contextlib.suppress(OSError):
            if self._rank != 0:
                write_sealed(note, {"attempt": self._attempt, "error": str(error)})
