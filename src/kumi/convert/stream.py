"""Filling files from a model on disk: many small jobs over the files, several at once, in memory of fixed size.

A job reads a few rows of a tensor into a buffer that is used again and again, changes their dtype where that is asked
for, and writes them to their place. Places are known before, so that jobs need no order. Where the elements keep their
order and lie one after the other, the job needs no rows: it copies or casts bytes (`kumi.convert.runs`).
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

from kumi.convert.rectangles import Dims
from kumi.convert.runs import BUFFER_BYTES, Run, Stored, Sums, Target, Wrote, write_all
from kumi.progress import Update, showing
from kumi.spec.precision import ITEMSIZE
from kumi.storage.write import as_bytes

if TYPE_CHECKING:  # imported where they are used: bytes are copied without torch, which takes seconds to import
    from torch import Tensor

    from kumi.convert.casts import Cast

# More threads than this only wait for each other on the disks of one machine.
MAX_THREADS = 8

# A tensor that has to be in memory as a whole, and is larger than this, is the only such one at the time.
_SMALL_BYTES = 16 * 2**20


# Lists the runs of a tensor anew, since a large checkpoint has too many to keep those of all tensors.
Runs = Callable[[], Iterable[Run]]


@dataclass(frozen=True)
class Reader:
    """A model's tensors: the dtype of each, by name, and how to read a part of one.

    `read_into(name, start, out)` fills `out`, of the tensor's dtype, with what begins at the indices `start`. Rows are
    best read from any `row` up to `cut(name, row)`.

    `runs(name)` are the bytes of all of the tensor, in the order of its elements, and `file_run(name, shape, dtype)`
    those of a tensor that Hugging Face's files have under `name`; None where they are not in files like that.
    """

    dtypes: Mapping[str, str]
    read_into: Callable[[str, Dims, Tensor], None]
    cut: Callable[[str, int], int]
    runs: Callable[[str], Runs | None] = lambda name: None
    file_run: Callable[[str, Dims, str], Run | None] = lambda name, shape, dtype: None

    def read(self, name: str, start: Dims, shape: Dims) -> Tensor:
        """The part of `shape` of a tensor, from the indices `start` on."""
        import torch

        out = torch.empty(shape, dtype=getattr(torch, self.dtypes[name]))
        self.read_into(name, start, out)
        return out


class Bench:
    """The buffers of a thread, used again for one tensor after another."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self._kept: dict[str, Tensor] = {}
        self._casts: dict[tuple[str, str], Cast] = {}

    def take(self, use: str, shape: Dims, dtype: str) -> Tensor:
        """An uninitialised tensor, valid until the next call for the same `use`."""
        import torch

        size = prod(shape) * ITEMSIZE[dtype]
        kept = self._kept.get(use)
        if kept is None or kept.numel() < size:
            self._kept.pop(use, None)
            kept = self._kept[use] = torch.empty(size, dtype=torch.uint8)
        return kept[:size].view(getattr(torch, dtype)).view(shape)

    def cast(self, before: str, after: str) -> Cast:
        """Return what casts as much as `buffer` has from one dtype to another."""
        if (before, after) not in self._casts:
            from kumi.convert.casts import make_cast

            self._casts[before, after] = make_cast(before, after, len(self.buffer) // ITEMSIZE[before])
        return self._casts[before, after]

    def drop_large(self) -> None:
        """Give back what the next jobs will hardly need."""
        self._kept = {use: kept for use, kept in self._kept.items() if kept.numel() <= _SMALL_BYTES}

    def rows(self, reader: Reader, name: str, start: Dims, shape: Dims, dtype: str) -> Tensor:
        """A part of a tensor, in `dtype`."""
        read = self.take("read", shape, reader.dtypes[name])
        reader.read_into(name, start, read)
        if reader.dtypes[name] == dtype:
            return read
        return self.take("cast", shape, dtype).copy_(read)


@dataclass(frozen=True)
class Job:
    """Something to write into `file`: `nbytes` bytes of it. `work(handle, bench, wrote)` calls `wrote` as it goes, with
    the bytes written since. A job that is `whole` holds a whole tensor in memory."""

    file: Path
    nbytes: int
    work: Callable[[int, Bench, Wrote], None]
    whole: bool = False


class Move(NamedTuple):
    """`numel` elements of a tensor, from number `first` on, that go to `offset` of a file; `sums` gets their bytes."""

    first: int
    numel: int
    offset: int
    sums: Sums | None = None


def copy_job(file: Path, runs: Runs, moves: Sequence[Move], before: str, after: str) -> Job:
    """Return the job that writes parts of the tensor that is stored as `runs`, cast from its dtype `before`."""
    size = ITEMSIZE[before]

    def work(handle: int, bench: Bench, wrote: Wrote) -> None:
        stored, cast = Stored(runs()), None if before == after else bench.cast(before, after)
        for move in moves:
            target = Target(handle, move.offset, wrote, cast, move.sums)
            stored.copy(move.first * size, (move.first + move.numel) * size, target, bench.buffer)

    return Job(file, sum(move.numel for move in moves) * ITEMSIZE[after], work)


def threads() -> int:
    """How many jobs are worth doing at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cores)


def run(jobs: Sequence[Job], title: str) -> None:
    """Do all jobs; at the first error the others stop, and it is raised. A bar shows how far it is, after a while."""
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
        if not hasattr(local, "bench"):
            local.bench = Bench()
        with _opened(job.file) as handle:
            if job.whole and job.nbytes > _SMALL_BYTES:
                with large:
                    job.work(handle, local.bench, wrote)
                    local.bench.drop_large()
            else:
                job.work(handle, local.bench, wrote)

    done, workers = [0], threads()
    with showing(title, sum(job.nbytes for job in jobs)) as update, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(do, job, update) for job in _spread(jobs, workers)]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Stopped(Exception):
    """Another job failed, or the user interrupted."""


def _spread(jobs: Sequence[Job], workers: int) -> list[Job]:
    """The jobs in an order in which neighbours write to different files, so that no thread waits for another's write,
    but only to as many as there are threads."""
    files: dict[Path, list[Job]] = {}
    for job in jobs:
        files.setdefault(job.file, []).append(job)
    waiting = list(files.values())
    groups = [waiting[first : first + workers] for first in range(0, len(waiting), workers)]
    return [job for group in groups for row in zip_longest(*group) for job in row if job is not None]


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    handle = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


def write_at(handle: int, data: Tensor, offset: int) -> None:
    """Write the bytes of a contiguous tensor."""
    write_all(handle, as_bytes(data), offset)
