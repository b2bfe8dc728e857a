"""Watch the ranks from their parent: record which rank died first and how, and stop the others.

The watch is a thread of the process that runs torch's elastic agent. The agent alone would give the surviving ranks 30
seconds after a failure, give them no time to save after a signal, and wait for ever for ranks that exit early without
an error.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kumi.launch.control_folder import has_returned, read_pids, release_ranks
from kumi.launch.signals import EXIT_CODES, StopFlag

_START_SECONDS = 0.01  # between polls until the ranks may begin
_POLL_SECONDS = 0.05  # between polls after that
# The rank that failed first may not be the first to report: a dying rank gets this long to report its failure.
_SETTLE_SECONDS = 3.0
_NEVER = float("inf")


@dataclass(frozen=True)
class RankDeath:
    """The end of a rank whose function did not return, or whose process then failed."""

    rank: int
    at: float  # monotonic seconds
    code: int | None  # exit code, negative for a signal; None if only the agent knows it


class OtherNodes(Protocol):
    """The other nodes of a run, as the watch of one node sees them (`kumi.launch.agent.HeadLink`)."""

    stopping: bool  # the ranks of this node must end
    decided: bool  # the run's end is decided, so what these ranks could still report does not count

    def note_started(self) -> None:
        """Note that all ranks of this node have started."""

    def may_begin(self) -> bool:
        """Return True once the ranks of all nodes have started."""


class Watch:
    """A thread that forwards a stop request to the ranks, and kills the remaining ranks after a failure.

    `control`: the control folder, in which ranks report to their parent. After a stop request, ranks have `grace`
    seconds before they are killed. `agent_signal` makes the agent in the main thread give up. `others`: the other
    nodes of the run; None without any.
    """

    def __init__(
        self,
        control: Path,
        nproc: int,
        flag: StopFlag,
        grace: float,
        agent_signal: signal.Signals,
        others: OtherNodes | None = None,
    ) -> None:
        self.deaths: list[RankDeath] = []
        self.killed: dict[int, str] = {}  # ranks that this watch killed -> process state before, see _process_state
        self.out_of_grace = False  # ranks were killed because they did not stop in time
        self._control, self._nproc, self._flag, self._grace = control, nproc, flag, grace
        self._agent_signal, self._others = agent_signal, others
        self._released = False
        self._pids: dict[int, int] = {}
        self._handles: dict[int, int] = {}  # living rank -> its pidfd, if the system has pidfds
        self._alive: set[int] = set()
        self._signalled: set[int] = set()
        self._kill_at = self._give_up_at = _NEVER
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kumi-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._find_ranks()
        self._note_deaths()
        for handle in self._handles.values():
            os.close(handle)

    def _run(self) -> None:
        """Watch until the block ends: find the ranks, release them once all have started, and note their deaths."""
        signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)  # only the main thread receives signals, which wake it
        while not self._ended.is_set():
            if len(self._pids) < self._nproc:
                self._find_ranks()
                if len(self._pids) == self._nproc and self._others is not None:
                    self._others.note_started()
            if len(self._pids) == self._nproc and not self._released:
                self._released = self._others is None or self._others.may_begin()
                if self._released:
                    release_ranks(self._control)
            self._pause(_POLL_SECONDS if self._released else _START_SECONDS)
            self._note_deaths()
            self._decide(time.monotonic())

    def _find_ranks(self) -> None:
        """Note the processes of ranks that have announced themselves in the control folder since the last call."""
        for rank, pid in read_pids(self._control).items():
            if rank in self._pids:
                continue
            self._pids[rank] = pid
            self._alive.add(rank)
            if hasattr(os, "pidfd_open"):
                try:
                    self._handles[rank] = os.pidfd_open(pid)
                except ProcessLookupError:
                    self._record_death(rank, None)

    def _pause(self, seconds: float) -> None:
        """Sleep for `seconds`, or until a rank ends: exact times of death show which death came first."""
        if self._handles:
            _ended_processes(self._handles.values(), seconds)
        else:
            time.sleep(seconds)

    def _note_deaths(self) -> None:
        """Record the ranks that have ended since the last call."""
        handles = {handle: rank for rank, handle in self._handles.items()}
        for handle in _ended_processes(handles, 0):
            code = _exit_code(handle)
            os.close(self._handles.pop(handles[handle]))
            self._record_death(handles[handle], code)
        for rank in self._alive - set(self._handles):
            if not _is_running(self._pids[rank]):
                self._record_death(rank, None)

    def _record_death(self, rank: int, code: int | None) -> None:
        """Note that the process of `rank` has ended: a death, unless its function returned without an error code."""
        now = time.monotonic()
        self._alive.discard(rank)
        if code or not has_returned(self._control, rank):
            self.deaths.append(RankDeath(rank, now, code))
            self._kill_at = min(self._kill_at, now + _SETTLE_SECONDS)

    def _decide(self, now: float) -> None:
        """Forward a stop request, kill the ranks whose time is over, and have the agent give up once all are dead."""
        requested = self._flag.requested
        if requested is not None and not self._signalled and not self.deaths:
            self._kill_at = min(self._kill_at, now + self._grace)
        if requested is not None:
            for rank in self._alive - self._signalled:
                self._signalled.add(rank)
                self._send(rank, signal.Signals(requested))
        if self._flag.insisted:
            self._kill_at = min(self._kill_at, now)
        if self._others is not None and self._others.stopping:
            self._kill_at = min(self._kill_at, now if self._others.decided else now + _SETTLE_SECONDS)
        if now >= self._kill_at:
            stopping = self._others is not None and self._others.stopping
            self.out_of_grace |= not self.deaths and not self._flag.insisted and not stopping
            for rank in self._alive - set(self.killed):
                self.killed[rank] = _process_state(self._pids[rank])
                self._send(rank, signal.SIGKILL)
        if self.deaths and not self._alive and len(self._pids) == self._nproc:
            self._give_up_at = min(self._give_up_at, now + _SETTLE_SECONDS)
        if now >= self._give_up_at:
            self._give_up_at = _NEVER
            os.kill(os.getpid(), self._agent_signal)

    def _send(self, rank: int, signum: signal.Signals) -> None:
        """Send a signal to `rank`, if it has not ended."""
        try:
            if rank in self._handles:
                signal.pidfd_send_signal(self._handles[rank], signum)
            else:
                os.kill(self._pids[rank], signum)
        except ProcessLookupError:  # the rank ended by itself a moment ago; the next round records it
            return


def _ended_processes(handles: Iterable[int], seconds: float) -> list[int]:
    """Return the pidfds in `handles` whose process has ended, after at most `seconds`.

    poll() is used because select() rejects descriptors above 1,023.
    """
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    return [handle for handle, _ in poll.poll(seconds * 1000)]


def _exit_code(handle: int) -> int | None:
    """Return the exit code of an ended process and leave it for the agent; None if the agent has read it already."""
    try:
        status = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# The kernel's letters of unusual states.
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a network file system"}


def _process_state(pid: int) -> str:
    """Return an unusual state of the process `pid` in words; "" for an ordinary or unknown state."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The program's name, which may contain any character, stands in brackets before the state.
    return _STATES.get(stat.rpartition(")")[2].split()[0], "")
