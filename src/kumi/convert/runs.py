"""Tensors as runs of bytes in files, and copying these from file to file.

Where neither the order of elements nor their dtype changes, no tensor is made of them and torch is not imported. Bytes
that no checksum covers are copied by the kernel; all others go through a buffer that is small enough for a core's
cache, so that the memory is read and written once.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, groupby
from pathlib import Path

from kumi.errors import ModelError
from kumi.files.untrusted import open_regular

# What the kernel copies in one call: little enough for the progress bar to move, and to stop soon.
KERNEL_BYTES = 2**25
BUFFER_BYTES = 2**18

Wrote = Callable[[int], None]


@dataclass(frozen=True)
class Run:
    """Bytes of a tensor, in the order of its elements: `nbytes` of `file` from `offset` on.

    `opened` gives a handle for reading the file. `check`, where the file has a checksum of these bytes, is given their
    CRC-32 and raises where it is another.
    """

    file: Path
    offset: int
    nbytes: int
    opened: Callable[[], AbstractContextManager[int]]
    check: Callable[[int], None] | None = None


def plain_run(file: Path, offset: int, nbytes: int) -> Run:
    """Return the run of bytes of a weight file that has no checksums."""
    return Run(file, offset, nbytes, partial(opened, file))


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """Open a weight file for reading; ModelError where that cannot be done."""
    try:
        handle = open_regular(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error}); fetch the file again") from None
    try:
        yield handle
    finally:
        os.close(handle)


def read_all(handle: int, view: memoryview, offset: int, file: Path) -> None:
    """Fill `view` with the bytes of `file`, open as `handle`, from `offset` on; ModelError where it ends before."""
    while view:
        count = os.preadv(handle, [view], offset)
        if count == 0:
            raise ModelError(f"{file}: ends at byte {offset}, earlier than when it was opened; fetch it again")
        view, offset = view[count:], offset + count


def write_all(handle: int, view: memoryview, offset: int) -> None:
    """Write all of `view` into a file, from `offset` on."""
    while view:
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


class Sums:
    """The CRC-32 of each block of `size` bytes, of bytes that are added in their order."""

    def __init__(self, size: int) -> None:
        self.sums: list[int] = []
        self._size, self._room = size, 0

    def add(self, view: memoryview) -> None:
        """Add the next bytes."""
        while view:
            if not self._room:
                self.sums.append(0)
                self._room = self._size
            part = view[: self._room]
            self.sums[-1] = zlib.crc32(part, self.sums[-1])
            view, self._room = view[len(part) :], self._room - len(part)


@dataclass
class Target:
    """A file that is open for writing as `handle`; what is written goes to `offset`, which then moves on.

    `wrote` is told the bytes that were written since it was told before. With `cast`, which returns the elements in
    their new dtype, these are what is written. `sums` gets all that is written.
    """

    handle: int
    offset: int
    wrote: Wrote = lambda count: None
    cast: Callable[[memoryview], memoryview] | None = None
    sums: Sums | None = None

    @property
    def takes_bytes(self) -> bool:
        """Whether bytes go into the file as they are and nobody has to see them."""
        return self.cast is None and self.sums is None

    def write(self, view: memoryview) -> None:
        """Write whole elements."""
        data = view if self.cast is None else self.cast(view)
        if self.sums is not None:
            self.sums.add(data)
        write_all(self.handle, data, self.offset)
        self.advance(len(data))

    def advance(self, count: int) -> None:
        """Note that `count` bytes were written."""
        self.offset += count
        self.wrote(count)


class Stored:
    """A tensor as the runs of bytes that are all of it, in the order of its elements."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = tuple(runs)
        self._ends = list(accumulate(run.nbytes for run in self._runs))

    def copy(self, low: int, high: int, target: Target, buffer: memoryview) -> None:
        """Write the bytes [low, high) of the tensor, whole elements, to `target`.

        RefusedError or ModelError where a checksum is wrong or a file has become shorter; what was written until then
        is of no use.
        """
        for _, cuts in groupby(self._cuts(low, high), key=lambda cut: cut.run.file):
            first = next(cuts)
            with first.run.opened() as source:
                for cut in chain((first,), cuts):
                    if cut.run.check is None and target.takes_bytes:
                        _copy_plain(source, cut, target, buffer)
                    else:
                        _copy_seen(source, cut, target, buffer)

    def _cuts(self, low: int, high: int) -> Iterator[_Cut]:
        for number in range(bisect_right(self._ends, low), len(self._runs)):
            run = self._runs[number]
            begin = self._ends[number] - run.nbytes
            if begin >= high:
                return
            yield _Cut(run, max(low, begin) - begin, min(high - begin, run.nbytes))


@dataclass(frozen=True)
class _Cut:
    """The bytes [first, last) of a run."""

    run: Run
    first: int
    last: int


def _copy_plain(source: int, cut: _Cut, target: Target, buffer: memoryview) -> None:
    at, end = cut.run.offset + cut.first, cut.run.offset + cut.last
    while at < end:
        count = _copy_by_kernel(source, target, min(end - at, KERNEL_BYTES), at)
        if count:
            target.advance(count)
        else:
            count = min(end - at, len(buffer))
            read_all(source, buffer[:count], at, cut.run.file)
            target.write(buffer[:count])
        at += count


def _copy_by_kernel(source: int, target: Target, count: int, at: int) -> int:
    """Return how many bytes the kernel copied, of `count` from `at` of `source` on.

    0 where it does not copy between these files, where the source ends, and where writing fails: reading and writing
    them tells which.
    """
    try:
        return os.copy_file_range(source, target.handle, count, at, target.offset)
    except (AttributeError, OSError):
        pass
    try:
        os.lseek(target.handle, target.offset, os.SEEK_SET)
        return os.sendfile(target.handle, source, at, count)
    except (AttributeError, OSError):
        return 0


def _copy_seen(source: int, cut: _Cut, target: Target, buffer: memoryview) -> None:
    """Copy through the buffer. Of a run with a checksum all bytes are read, since it is one of all of them."""
    run, crc32 = cut.run, 0
    low, high = (cut.first, cut.last) if run.check is None else (0, run.nbytes)
    for begin in range(low, high, len(buffer)):
        block = buffer[: min(len(buffer), high - begin)]
        try:
            read_all(source, block, run.offset + begin, run.file)
        except ModelError:
            if run.check is not None:
                run.check(crc32)  # a file with checksums is damaged where it ends early
            raise
        if run.check is not None:
            crc32 = zlib.crc32(block, crc32)
        part = block[max(0, cut.first - begin) : max(0, cut.last - begin)]
        if part:
            target.write(part)
    if run.check is not None:
        run.check(crc32)
