"""Tensors as byte ranges ("runs") of files, and copying runs from file to file.

Where neither element order nor dtype changes, bytes are copied without torch. The kernel copies bytes that need no
checksum; bytes that need one, or a cast, pass through a buffer that fits in a core's cache, so that memory is read and
written once.
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

# Bytes per call to the kernel: few enough for a smooth progress bar and a quick stop.
KERNEL_BYTES = 2**25
# Bytes of a buffer, which fits in a core's cache.
BUFFER_BYTES = 2**18

# Called after each write with the number of bytes written.
Wrote = Callable[[int], None]


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a tensor: the `nbytes` bytes of `file` that begin at `offset`.

    open_file   opens the file for reading
    check       for a run with a checksum: called with the CRC-32 of its bytes, raises unless it is right
    """

    file: Path
    offset: int
    nbytes: int
    open_file: Callable[[], AbstractContextManager[int]]
    check: Callable[[int], None] | None = None


def plain_run(file: Path, offset: int, nbytes: int) -> Run:
    """Return a run of a weight file without checksums."""
    return Run(file, offset, nbytes, partial(open_weight_file, file))


@contextmanager
def open_weight_file(file: Path) -> Iterator[int]:
    """Open a weight file for reading; raise ModelError where that fails."""
    try:
        handle = open_regular(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror or error}); fetch the file again") from None
    try:
        yield handle
    finally:
        os.close(handle)


def read_all(handle: int, view: memoryview, offset: int, file: Path) -> None:
    """Fill `view` with the bytes at `offset` of `file`, open as `handle`. Raise ModelError if the file ends early."""
    while view:
        count = os.preadv(handle, [view], offset)
        if count == 0:
            raise ModelError(f"{file}: ends at byte {offset}, earlier than when it was opened; fetch it again")
        view, offset = view[count:], offset + count


def write_all(handle: int, view: memoryview, offset: int) -> None:
    """Write all of `view` into a file at `offset`."""
    while view:
        count = os.pwrite(handle, view, offset)
        view, offset = view[count:], offset + count


class Sums:
    """CRC-32 checksums of consecutive blocks of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.sums: list[int] = []
        self._size, self._left = size, 0

    def add(self, view: memoryview) -> None:
        """Add the next bytes."""
        while view:
            if not self._left:
                self.sums.append(0)
                self._left = self._size
            part = view[: self._left]
            self.sums[-1] = zlib.crc32(part, self.sums[-1])
            view, self._left = view[len(part) :], self._left - len(part)


@dataclass
class Target:
    """A file open for writing as `handle`; each write goes to `offset` and advances it.

    wrote   called with the number of bytes after each write
    cast    casts elements to the file's dtype before they are written
    sums    checksums of the written bytes
    """

    handle: int
    offset: int
    wrote: Wrote = lambda count: None
    cast: Callable[[memoryview], memoryview] | None = None
    sums: Sums | None = None

    @property
    def accepts_raw_bytes(self) -> bool:
        """True if bytes are written unchanged and without a checksum, so that the kernel can copy them."""
        return self.cast is None and self.sums is None

    def write(self, view: memoryview) -> None:
        """Write the bytes of complete elements."""
        data = view if self.cast is None else self.cast(view)
        if self.sums is not None:
            self.sums.add(data)
        write_all(self.handle, data, self.offset)
        self.advance(len(data))

    def advance(self, count: int) -> None:
        """Record that `count` bytes were written."""
        self.offset += count
        self.wrote(count)


class RunSequence:
    """A tensor, given by its runs in the order of its elements."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = tuple(runs)
        self._ends = list(accumulate(run.nbytes for run in self._runs))

    def copy(self, low: int, high: int, target: Target, buffer: memoryview) -> None:
        """Write the bytes [low, high) of the tensor (complete elements) to `target`.

        Raise RefusedError or ModelError for a wrong checksum or a file that ends early; the target is then unusable.
        """
        for _, segments in groupby(self._segments(low, high), key=lambda segment: segment.run.file):
            first = next(segments)
            with first.run.open_file() as source:
                for segment in chain((first,), segments):
                    if segment.run.check is None and target.accepts_raw_bytes:
                        _copy_plain(source, segment, target, buffer)
                    else:
                        _copy_buffered(source, segment, target, buffer)

    def _segments(self, low: int, high: int) -> Iterator[_Segment]:
        """Yield the segments of runs that cover the bytes [low, high) of the tensor."""
        for index in range(bisect_right(self._ends, low), len(self._runs)):
            run = self._runs[index]
            begin = self._ends[index] - run.nbytes
            if begin >= high:
                return
            yield _Segment(run, max(low, begin) - begin, min(high - begin, run.nbytes))


@dataclass(frozen=True)
class _Segment:
    """The bytes [first, last) of a run."""

    run: Run
    first: int
    last: int


def _copy_plain(source: int, segment: _Segment, target: Target, buffer: memoryview) -> None:
    """Copy a segment without a checksum, by the kernel where possible, else through the buffer."""
    position, end = segment.run.offset + segment.first, segment.run.offset + segment.last
    while position < end:
        count = _copy_by_kernel(source, target, min(end - position, KERNEL_BYTES), position)
        if count:
            target.advance(count)
        else:
            count = min(end - position, len(buffer))
            read_all(source, buffer[:count], position, segment.run.file)
            target.write(buffer[:count])
        position += count


def _copy_by_kernel(source: int, target: Target, count: int, at: int) -> int:
    """Let the kernel copy up to `count` bytes at `at` of `source`; return the number of bytes that it copied.

    Return 0 if the kernel does not support these files, at the end of the source, or if writing fails. The caller then
    reads and writes, which raises the specific error.
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


def _copy_buffered(source: int, segment: _Segment, target: Target, buffer: memoryview) -> None:
    """Copy a segment through the buffer. If its run has a checksum, read the complete run to verify the checksum."""
    run, crc32 = segment.run, 0
    low, high = (segment.first, segment.last) if run.check is None else (0, run.nbytes)
    for begin in range(low, high, len(buffer)):
        block = buffer[: min(len(buffer), high - begin)]
        try:
            read_all(source, block, run.offset + begin, run.file)
        except ModelError:
            if run.check is not None:
                run.check(crc32)  # reports the early end as damage
            raise
        if run.check is not None:
            crc32 = zlib.crc32(block, crc32)
        part = block[max(0, segment.first - begin) : max(0, segment.last - begin)]
        if part:
            target.write(part)
    if run.check is not None:
        run.check(crc32)
