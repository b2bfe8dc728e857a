"""The storage of checkpoints: safetensors and JSON, no pickle; and saving them while training goes on.

The parts: `write` (shards, index, commit), `read` (open, verify, slices), `folders`
(which there are, rotation, free space). This is their one public face.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.errors import KumiError, SaveError
from kumi.storage.folders import (
    clean,
    free_space_check,
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
    "clean",
    "commit",
    "free_space_check",
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
    """Nothing, when this rank's pieces, and on rank 0 the whole checkpoint `folder`, are on the disk.

    Every rank calls it; only rank 0 waits for the others (`timeout` seconds), by looking at the files, without a
    collective. Rank 0 removes leftovers first, and afterwards all but the newest `keep` checkpoints. Raises SaveError.
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


class AsyncSaver:
    """Saves checkpoints in a background thread, one at a time, from a copy of the pieces in host memory.

    `save` returns when the copy is taken: training may change the tensors at once. The buffers of the copy are kept
    and used again, so the memory it takes is that of one checkpoint's pieces. An error in the thread is raised by the
    next `save` or `wait`. A process must `wait` before it ends, or the last checkpoint stays unfinished (and unseen).
    """

    def __init__(self, *, rank: int = 0, ranks: int = 1, attempt: str = "", timeout: float = 600.0) -> None:
        self._rank, self._ranks, self._attempt, self._timeout = rank, ranks, attempt, timeout
        self._buffers: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        folder: Path | str,
        pieces: Sequence[Piece],
        meta: Mapping[str, Any],
        *,
        keep: int | None = None,
        protect: Sequence[Path | str] = (),
    ) -> None:
        """Nothing, when the previous save has ended (its SaveError is raised here) and a copy of `pieces` is taken."""
        self.wait()
        frozen = json.loads(json.dumps(meta))
        copies = self._snapshot(pieces)
        options = {
            "rank": self._rank,
            "ranks": self._ranks,
            "attempt": self._attempt,
            "timeout": self._timeout,
            "keep": keep,
            "protect": tuple(protect),
        }
        # A daemon, so that a process that has to die is not held up; an unfinished checkpoint is never seen.
        self._thread = threading.Thread(
            target=self._run, args=(Path(folder), copies, frozen, options), name="kumi-save", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Nothing, when no save is under way. Raises SaveError (exit code 8) when the last one failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Nothing, as long as no save has failed. Raises SaveError at once when one has."""
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, KumiError):
                raise error
            raise SaveError(f"the checkpoint could not be written: {type(error).__name__}: {error}") from error

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def _snapshot(self, pieces: Sequence[Piece]) -> list[Piece]:
        import torch

        copies, device = [], None
        buffers = {}
        for piece in pieces:
            key, data = (piece.name, piece.start), piece.data.detach()
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != data.shape or buffer.dtype != data.dtype:
                buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            buffer.copy_(data, non_blocking=data.is_cuda)
            device = data.device if data.is_cuda else device
            buffers[key] = buffer
            copies.append(piece._replace(data=buffer))
        if device is not None:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = buffers
        return copies

    def _run(self, folder: Path, copies: list[Piece], meta: dict[str, Any], options: dict[str, Any]) -> None:
        try:
            save(folder, copies, meta, **options)
        except BaseException as error:
            self._error = error
            self._tell_rank_0(folder, error)

    def _tell_rank_0(self, folder: Path, error: BaseException) -> None:
        """Leaves a note for rank 0, which otherwise waits in vain until its time is up."""
        note = temporary_folder(folder) / f"failed_{self._rank:05d}.json"
        # What keeps this rank from writing may keep it from writing this too; rank 0 then waits for its timeout.
        with contextlib.suppress(OSError):
            if self._rank != 0:
                write_sealed(note, {"attempt": self._attempt, "error": str(error)})
