"""Blame the row that a worker was rendering when it ended, and refuse that row alone.

A worker writes the place of each conversation to a small file that it shares with its parent, which costs less than a
microsecond. The parent reads the file of a worker that ended, and repeats the worker's job with that row refused: the
result of a job depends on its rows alone, whichever worker ends when.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kumi.data.chat import limits
from kumi.data.chat.limits import Limits
from kumi.data.chat.masked import RowRefused
from kumi.errors import DataError

CRASH = "template-crash"
# The variable that gives a worker the descriptor of its file.
VARIABLE = "KUMI_ROW_FILE"
# Rows in succession that take too long, after which the preparation stops.
TIMEOUTS = 3
# Workers that may end in the rows of one job before the preparation stops.
DEATHS = 16
# The phases that a worker announces.
IDLE, COMPILING, RENDERING = range(3)
# The announcement: phase, segment and line as integers, then the path of the template's file, up to _SIZE bytes.
_PLACE, _SIZE = struct.Struct("<qqq"), 4096


class StoppedError(DataError):
    """The end of a preparation because of its chat template."""


class RowGuard:
    """Announces the rows of a worker. `refused` has [segment, line, kind] of the rows that ended an earlier worker."""

    def __init__(self, refused: Iterable[Sequence[Any]] = ()) -> None:
        self._refused = {(segment, line): kind for segment, line, kind in refused}
        descriptor = os.environ.get(VARIABLE)
        # Without a parent, no other process reads the announcements: they are in memory without a file.
        self._file = mmap.mmap(int(descriptor) if descriptor else -1, _SIZE)
        self._origin, self._timeouts = "the chat template", 0
        # A worker that is killed leaves no dump of its memory.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    @contextmanager
    def compiling(self, origin: str) -> Iterator[None]:
        """Announce that the body compiles the template of the file `origin`."""
        self._origin = origin
        raw = origin.encode(errors="replace")[: _SIZE - _PLACE.size]
        self._file[_PLACE.size :] = raw.ljust(_SIZE - _PLACE.size, b"\0")
        self._announce(COMPILING)
        try:
            yield
        finally:
            self._announce(IDLE)

    @contextmanager
    def rendering(self, segment: int, line: int, bounds: Limits) -> Iterator[None]:
        """Announce the row in which the body renders one conversation within `bounds`.

        Raise RowRefused at once for a row that ended an earlier worker. Raise StoppedError if the time limit refuses
        this row and the `TIMEOUTS` - 1 rows before it.
        """
        try:
            self._check(segment, line, bounds)
            bounds.start()
            self._announce(RENDERING, segment, line)
            try:
                yield
            except BaseException as error:
                # A panic of a library in Rust: its class is not importable, and does not derive from Exception.
                if type(error).__name__ != "PanicException":
                    raise
                raise RowRefused(CRASH, _reason(CRASH, bounds)) from None
            finally:
                bounds.end()
                self._announce(IDLE)
        except RowRefused as refused:
            self._timeouts = self._timeouts + 1 if refused.kind == limits.TIME else 0
            if self._timeouts < TIMEOUTS:
                raise
            reason = refused.reason
        else:
            self._timeouts = 0
            return
        raise StoppedError(
            f"{self._origin}: {TIMEOUTS} rows in succession are refused, each because {reason}; "
            "set data.chat.template to another template, or raise that limit"
        )

    def _check(self, segment: int, line: int, bounds: Limits) -> None:
        """Raise RowRefused for a row that ended an earlier worker."""
        kind = self._refused.get((segment, line))
        if kind is not None:
            raise RowRefused(kind, _reason(kind, bounds))

    def _announce(self, phase: int, segment: int = 0, line: int = 0) -> None:
        _PLACE.pack_into(self._file, 0, phase, segment, line)


def _reason(kind: str, bounds: Limits) -> str:
    """Return why a row that ended a worker is refused, by the kind of its refusal."""
    if kind == limits.TIME:
        return limits.timeout_reason(bounds.timeout_s)
    if kind == limits.MEMORY:
        return limits.memory_reason(bounds.memory_gib)
    return "a fault in compiled code ends the process that renders or tokenizes it"


class Announced:
    """The parent's side of the announcements of one worker, which writes them to the file `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _SIZE)

    def repeated_job(self, job: dict[str, Any], code: int) -> dict[str, Any] | None:
        """Return the job to run instead of `job`, whose worker ended with `code`; None if no row is to blame.

        It refuses the row that the worker was rendering. A negative code is a signal. SIGKILL may have another reason,
        such as other programs' need of memory: after the first one, the job is repeated with the row, and a second one
        refuses it. Raise StoppedError if compiling the template ended the worker, or after `DEATHS` workers.
        """
        phase, *row = _PLACE.unpack_from(self._map)
        origin = self._map[_PLACE.size :].rstrip(b"\0").decode(errors="replace")
        if phase == IDLE or -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return None
        is_first_kill = -code == signal.SIGKILL and job.get("suspect") != row
        if phase == COMPILING:
            if is_first_kill:
                return None
            raise StoppedError(
                f"{origin}: compiling the chat template ended the process; set data.chat.template to another template"
            )
        deaths = job.get("deaths", 0) + 1
        if deaths > DEATHS:
            raise StoppedError(
                f"{origin}: {deaths} rows of one part of the data ended the process that renders them; "
                "set data.chat.template to another template"
            )
        if is_first_kill:
            return {**job, "deaths": deaths, "suspect": row}
        kinds = {signal.SIGVTALRM: limits.TIME, signal.SIGKILL: limits.MEMORY, signal.SIGABRT: limits.MEMORY}
        kind = kinds.get(signal.Signals(-code), CRASH) if code < 0 else CRASH
        return {**job, "deaths": deaths, "refused_rows": [*job.get("refused_rows", ()), [*row, kind]]}


@contextmanager
def open_announced() -> Iterator[Announced]:
    """Open the file of a new worker; it has no name, so no other process can open it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(_SIZE)
        yield Announced(file.fileno())


def check_refused(
    source: str, origin: str, rows: int, refused: Mapping[str, int], reasons: Sequence[str], max_refused: float
) -> None:
    """Raise StoppedError if more than the fraction `max_refused` of the `rows` rows of `source` is refused.

    refused: number of refused rows by kind. reasons: the first few reasons, in the source's order, each with its place.
    """
    total = sum(refused.values())
    if total <= max_refused * rows:
        return
    kinds = ", ".join(
        f"{count} {kind}" for kind, count in sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    )
    raise StoppedError(
        f"{source}: {total} of {rows} rows are refused with the chat template {origin} ({kinds}), more than "
        f"data.chat.max_refused={max_refused:g}; the first: {'; '.join(reasons)}; correct the data or set another "
        "data.chat.template, or raise max_refused"
    )
