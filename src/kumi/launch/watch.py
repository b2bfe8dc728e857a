"""Watching started ranks from their parent: who died first and how, and stopping the others.

A thread beside torch's elastic agent, because the agent gives the surviving ranks 30 seconds after a failure and none
to save after a signal.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kumi.launch import rank as ranks
from kumi.launch.signals import StopFlag

_SETTLE_SECONDS = 2.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Death:
    """That a rank's process ended: when (monotonic seconds), and its exit code, negative for a signal, None unknown."""

    rank: int
    at: float
    code: int | None


class Watch:
    """The thread: forwards a stop request, and kills what is left when a rank failed or the grace is over."""

    def __init__(self, control: Path, flag: StopFlag, grace: float) -> None:
        self.deaths: list[Death] = []
        self.killed: set[int] = set()
        self.out_of_grace = False
        self._control, self._flag, self._grace = control, flag, grace
        self._handles: dict[int, int] = {}
        self._poll = select.poll()
        self._told: set[int] = set()
        self._kill_at = float("inf")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kumi-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for handle in self._handles.values():
            os.close(handle)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._find_ranks()
            self._note_deaths()
            self._decide()

    def _find_ranks(self) -> None:
        for rank, pid in ranks.read_pids(self._control).items():
            if rank not in self._handles:
                self._handles[rank] = os.pidfd_open(pid)
                self._poll.register(self._handles[rank], select.POLLIN)

    def _note_deaths(self) -> None:
        for handle, _ in self._poll.poll(_POLL_SECONDS * 1000):
            at = time.monotonic()
            self._poll.unregister(handle)
            rank = next(rank for rank, known in self._handles.items() if known == handle)
            death = Death(rank, at, _exit_code(handle))
            self.deaths.append(death)
            if death.code != 0:
                # The others need a moment to report; the first report is not always that of the first to fail.
                self._kill_at = min(self._kill_at, at + _SETTLE_SECONDS)

    def _decide(self) -> None:
        now = time.monotonic()
        alive = set(self._handles) - {death.rank for death in self.deaths}
        if self._flag.requested is not None:
            if not self._told and self._kill_at == float("inf"):
                self._kill_at = now + self._grace
            for rank in alive - self._told:
                self._send(rank, signal.Signals(self._flag.requested))
                self._told.add(rank)
        if self._flag.insisted:
            self._kill_at = min(self._kill_at, now)
        if now >= self._kill_at:
            self.out_of_grace |= not self._flag.insisted and not any(death.code for death in self.deaths)
            for rank in alive - self.killed:
                self.killed.add(rank)
                self._send(rank, signal.SIGKILL)

    def _send(self, rank: int, signum: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._handles[rank], signum)
        except ProcessLookupError:  # it ended by itself; its death is noted in the next round
            return


def _exit_code(handle: int) -> int | None:
    """The exit code of the process, left in place for the agent to collect; None when the agent was faster."""
    try:
        status = os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
