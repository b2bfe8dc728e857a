"""Stop requests by signals: the first sets a flag that the loop polls, the second raises SystemExit, the third exits.

flag = signals.install()
for step in ...:
    ...
    if flag.requested:            # after all ranks have agreed on it by an all-reduce
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

# SIGHUP: the terminal is gone. SIGUSR1: batch systems are configured to send it some time before a job's time limit.
EXIT_CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    signal.SIGUSR1: REQUEUE,
}
# One Ctrl-C, `timeout` or `scancel` may reach a process several times: signals this close together are one request.
_SAME_REQUEST_SECONDS = 1.0


class StopFlag:
    """The signal handler, and the state that it sets.

    Unless the flag is `patient`, the second stop request raises SystemExit with the exit code of the first one, and the
    third ends the process at once.
    """

    def __init__(self) -> None:
        self.requested: int | None = None  # number of the first stop signal
        self.insisted = False  # there was a second request
        self.patient = False  # set where another process or thread ends the ranks: requests then only set the state
        self._received_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        before, self._received_at = self._received_at, time.monotonic()
        if self.requested is None:
            self.requested = signum
        elif self._received_at - before >= _SAME_REQUEST_SECONDS:
            already, self.insisted = self.insisted, True
            if not self.patient:
                if already:
                    os._exit(exit_code(self.requested))
                raise SystemExit(exit_code(self.requested))


def exit_code(signum: int) -> int:
    """Return the exit code of a process that saved and stopped because of `signum`: 130, 143, or 75 (run again)."""
    return EXIT_CODES[signal.Signals(signum)]


def install() -> StopFlag:
    """Install a StopFlag for the stop signals, or return the installed one. Call it from the main thread.

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
    """Install a StopFlag and restore the previous handlers at the end of the block."""
    before: dict[signal.Signals, Any] = {signum: signal.getsignal(signum) for signum in EXIT_CODES}
    try:
        yield install()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """Within the block, a stop signal ends the process with the signal's exit code. Ctrl-C raises KeyboardInterrupt.

    It is for the time before and after training, when there is nothing to save. Outside the main thread, which alone
    gets signals, the block has no effect.
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


def hang_up_with_stdin() -> None:
    """Send SIGHUP to this process when its standard input closes. Otherwise it would run on when its ssh client dies.

    Whoever starts this process keeps the other end of a pipe open. Bytes that come through the pipe are dropped.
    """
    threading.Thread(target=_await_end_of_stdin, name="kumi-stdin", daemon=True).start()


def _await_end_of_stdin() -> None:
    """Read standard input until it ends, then send SIGHUP to the main thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)  # only the main thread receives signals
    try:
        while os.read(0, 4096):
            continue
    except OSError:  # it was closed before
        pass
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)


def _leave(signum: int, frame: FrameType | None) -> None:
    name = signal.Signals(signum).name
    print(f"{name}: stopped; run the same command again to continue", file=sys.stderr, flush=True)
    raise SystemExit(exit_code(signum))
