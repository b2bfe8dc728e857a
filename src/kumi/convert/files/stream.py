"""Fill files from a model on disk: many small jobs, run in a few threads in bounded memory.

A job reads blocks of rows of a tensor into a reused buffer, casts them if needed, and writes them to their offset in
the target. Offsets are known in advance, so jobs run in any order. Where elements are contiguous and keep their order,
the job copies or casts bytes instead (`kumi.convert.files.byte_runs`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kumi.convert.files.byte_runs import BUFFER_BYTES, Run, RunSequence, Sums, Target, Wrote, write_all
from kumi.convert.files.slices import Dims
from kumi.process_limits import usable_cores
from kumi.progress import Update, show_progress
from kumi.spec.precision import ITEMSIZE
from kumi.storage.write import as_bytes

if TYPE_CHECKING:  # copying bytes needs no torch, which takes seconds to import
    from torch import Tensor

    from kumi.convert.files.casts import Cast

# More threads only compete for one machine's disks.
_MAX_THREADS = 8

# Jobs that need an entire tensor in memory run one at a time if the tensor has more bytes than this.
_SMALL_BYTES = 16 * 2**20


# Lists the runs of a tensor on demand: a large checkpoint has too many runs to keep in memory.
Runs = Callable[[], Iterable[Run]]


@dataclass(frozen=True)
class Reader:
    """Reads a model's tensors, slice by slice.

    dtypes                          dtype of each tensor, by name
    read_into(name, start, out)     fills `out` (of the tensor's dtype) with the slice that begins at `start`
    block_end(name, row)            end of the block of rows that should be read together from `row` on
    runs(name)                      lists the byte ranges of the tensor in element order; None if the elements are in
                                    another order in the files
    file_run(name, shape, dtype)    byte range of the Hugging Face tensor `name`; None if no file has it with this shape
                                    and dtype
    """

    dtypes: Mapping[str, str]
    read_into: Callable[[str, Dims, Tensor], None]
    block_end: Callable[[str, int], int]
    runs: Callable[[str], Runs | None] = lambda name: None
    file_run: Callable[[str, Dims, str], Run | None] = lambda name, shape, dtype: None

    def read(self, name: str, start: Dims, shape: Dims) -> Tensor:
        """Return the slice of a tensor that begins at `start` and has the shape `shape`."""
        import torch

        out = torch.empty(shape, dtype=getattr(torch, self.dtypes[name]))
        self.read_into(name, start, out)
        return out


class ThreadBuffers:
    """The buffers of a thread, reused from tensor to tensor."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self._tensors: dict[str, Tensor] = {}
        self._casts: dict[tuple[str, str], Cast] = {}

    def take(self, use: str, shape: Dims, dtype: str) -> Tensor:
        """Return an uninitialized tensor, valid until the next call with the same `use`."""
        import torch

        size = prod(shape) * ITEMSIZE[dtype]
        buffer = self._tensors.get(use)
        if buffer is None or buffer.numel() < size:
            self._tensors.pop(use, None)
            buffer = self._tensors[use] = torch.empty(size, dtype=torch.uint8)
        return buffer[:size].view(getattr(torch, dtype)).view(shape)

    def cast(self, before: str, after: str) -> Cast:
        """Return a function that casts up to a full `buffer` from the dtype `before` to `after`."""
        if (before, after) not in self._casts:
            from kumi.convert.files.casts import make_cast

            self._casts[before, after] = make_cast(before, after, len(self.buffer) // ITEMSIZE[before])
        return self._casts[before, after]

    def drop_large(self) -> None:
        """Free buffers above `_SMALL_BYTES`."""
        self._tensors = {use: buffer for use, buffer in self._tensors.items() if buffer.numel() <= _SMALL_BYTES}

    def rows(self, reader: Reader, name: str, start: Dims, shape: Dims, dtype: str) -> Tensor:
        """Read a slice of a tensor, cast to `dtype`."""
        read = self.take("read", shape, reader.dtypes[name])
        reader.read_into(name, start, read)
        if reader.dtypes[name] == dtype:
            return read
        return self.take("cast", shape, dtype).copy_(read)


@dataclass(frozen=True)
class Job:
    """Writes `nbytes` bytes into `file`.

    work(handle, buffers, wrote)   writes, and calls `wrote` with the number of bytes written since the last call
    whole                          True if the job holds an entire tensor in memory
    """

    file: Path
    nbytes: int
    work: Callable[[int, ThreadBuffers, Wrote], None]
    whole: bool = False


class Move(NamedTuple):
    """The `numel` elements of a tensor from index `first` on, and the byte `offset` in the target to write them to.

    `sums`, if given, computes checksums of the written bytes.
    """

    first: int
    numel: int
    offset: int
    sums: Sums | None = None


def copy_job(file: Path, runs: Runs, moves: Sequence[Move], before: str, after: str) -> Job:
    """Return the job that copies the elements of `moves` to `file`, cast from the tensor's dtype `before` to `after`.

    `runs` lists the byte ranges of the tensor.
    """
    size = ITEMSIZE[before]

    def work(handle: int, buffers: ThreadBuffers, wrote: Wrote) -> None:
        stored, cast = RunSequence(runs()), None if before == after else buffers.cast(before, after)
        for move in moves:
            target = Target(handle, move.offset, wrote, cast, move.sums)
            stored.copy(move.first * size, (move.first + move.numel) * size, target, buffers.buffer)

    return Job(file, sum(move.numel for move in moves) * ITEMSIZE[after], work)


def num_threads() -> int:
    """Return the number of jobs to run at once."""
    return min(_MAX_THREADS, usable_cores())


def run(jobs: Sequence[Job], title: str) -> None:
    """Run all jobs in threads, with a progress bar.

    At the first error the other jobs are stopped, and the error is raised.
    """
    stop, lock, local, large = threading.Event(), threading.Lock(), threading.local(), threading.Lock()

    def do(job: Job, update: Update) -> None:
        def wrote(count: int) -> None:
            if stop.is_set():
                raise _Stopped
            with lock:
                done[0] += count
                update(done[0])

        if stop.is_set():
            return
        if not hasattr(local, "buffers"):
            local.buffers = ThreadBuffers()
        with _open_for_writing(job.file) as handle:
            if job.whole and job.nbytes > _SMALL_BYTES:
                with large:
                    job.work(handle, local.buffers, wrote)
                    local.buffers.drop_large()
            else:
                job.work(handle, local.buffers, wrote)

    done, workers = [0], num_threads()
    with show_progress(title, sum(job.nbytes for job in jobs)) as update, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(do, job, update) for job in _interleave_files(jobs, workers)]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Stopped(Exception):
    """Another job failed, or the user interrupted."""


def _interleave_files(jobs: Sequence[Job], workers: int) -> list[Job]:
    """Order jobs such that neighbours write to different files, and threads do not wait for each other's writes.

    At most `workers` files are written at a time.
    """
    files: dict[Path, list[Job]] = {}
    for job in jobs:
        files.setdefault(job.file, []).append(job)
    by_file = list(files.values())
    groups = [by_file[first : first + workers] for first in range(0, len(by_file), workers)]
    return [job for group in groups for round_ in zip_longest(*group) for job in round_ if job is not None]


@contextmanager
def _open_for_writing(file: Path) -> Iterator[int]:
    """Yield a file descriptor of the existing `file`, open for writing."""
    handle = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def write_at(handle: int, data: Tensor, offset: int) -> None:
    """Write the bytes of a contiguous tensor at `offset`."""
    write_all(handle, as_bytes(data), offset)
