"""How a process is asked to stop: the first signal sets a flag that the loop polls, the second ends it at once.

flag = signals.install()
for step in ...:
    ...
    if flag.requested:            # all ranks agree on it first, by reducing it with max
        save()
        return signals.exit_code(flag.requested)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kumi.errors import INTERRUPTED, REQUEUE, TERMINATED

# SIGHUP is a lost terminal; SIGUSR1 is what batch systems are told to send some time before a job's time is up.
EXIT_CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: REQUEUE,
}
# One Ctrl-C, `timeout` or `scancel` reaches a process on several ways: signals this close together are one request.
_SAME_REQUEST_SECONDS = 1.0


class StopFlag:
    """`requested`: the number of the first signal that asked to stop, None before; `insisted`: whether a second came.

    It is the signal handler itself. Where it is not `patient`, the second request raises SystemExit with the exit
    code of the first, and the third ends the process on the spot.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self.insisted = False
        self.patient = False
        self._heard_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        before, self._heard_at = self._heard_at, time.monotonic()
        if self.requested is None:
            self.requested = signum
        elif self._heard_at - before >= _SAME_REQUEST_SECONDS:
            already, self.insisted = self.insisted, True
            if not self.patient:
                if already:
                    os._exit(exit_code(self.requested))
                raise SystemExit(exit_code(self.requested))


def exit_code(signum: int) -> int:
    """What a process that saved because of signal `signum` ends with: 130, 143, or 75 (please run again)."""
    return EXIT_CODES[signal.Signals(signum)]


def install() -> StopFlag:
    """The flag that signals to this process set; the same one when there is one already. For the main thread.

    A signal that the process was started to ignore (as by nohup) stays ignored.
    """
    present = signal.getsignal(signal.SIGTERM)
    flag = present if isinstance(present, StopFlag) else StopFlag()
    for signum in EXIT_CODES:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, flag)
    return flag


@contextmanager
def installed() -> Iterator[StopFlag]:
    """The flag, until the end of the block, when the handlers that were there before are back."""
    before: dict[signal.Signals, Any] = {signum: signal.getsignal(signum) for signum in EXIT_CODES}
    try:
        yield install()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def leaving() -> Iterator[None]:
    """Until ranks train, and once they have: a signal ends the process with its exit code, for there is nothing to
    save. Ctrl-C goes on raising KeyboardInterrupt. Does nothing outside of the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in EXIT_CODES if signum != signal.SIGINT}
    for signum, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(signum, _leave)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    name = signal.Signals(signum).name
    print(f"{name}: ended; what is done is kept, and the same command goes on from there", file=sys.stderr, flush=True)
    raise SystemExit(exit_code(signum))
