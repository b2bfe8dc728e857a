"""What each started rank does around the function it runs: dies with its parent, logs, and says why it failed."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kumi.errors import CommunicationError, KumiError
from kumi.launch import signals

_PR_SET_PDEATHSIG = 1
# How the end of another rank reads in this one where gloo raises a bare RuntimeError.
_ECHOES = ("closed by peer", "connection reset", "connection refused", "broken pipe", "timed out")


@dataclass(frozen=True)
class Start:
    """What a rank needs to know: where to report, where to log, who its parent is, how many threads it has."""

    control: Path
    log_dir: Path
    parent: int
    threads: int


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: when (monotonic seconds), the names of the error's classes, its text and traceback.

    `echo`: it may be the consequence of another rank's failure.
    """

    rank: int
    at: float
    kinds: list[str]
    message: str
    trace: str
    echo: bool


def log_path(log_dir: Path, rank: int) -> Path:
    """The log of `rank`: all it prints for ranks other than 0, tracebacks for rank 0, which prints to the terminal."""
    return log_dir / f"rank_{rank:05d}.log"


def run_rank(fn: Callable[..., int | None], args: tuple[Any, ...], start: Start) -> int:
    """The exit code that `fn` returns, in a started process; on an error the process ends here and leaves a Failure."""
    import torch

    rank = int(os.environ["RANK"])
    _die_with(start.parent)
    log = os.open(log_path(start.log_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if rank != 0:
        _redirect_output(log)
    faulthandler.enable(file=log)
    flag = signals.install()
    flag.patient = True  # the parent decides when patience ends
    torch.set_num_threads(start.threads)
    _publish(start.control / f"{rank}.pid", str(os.getpid()))
    try:
        code = _await_all(start.control, flag)
        if code is None:
            code = _call(fn, args)
    except BaseException as error:
        _fail(rank, error, start.control, log)
    _flush()
    _publish(start.control / f"{rank}.returned", str(code))
    return code


def let_all_go(control: Path) -> None:
    """Lets the ranks begin, which wait for this until all are there."""
    (control / "go").touch()


def _await_all(control: Path, flag: signals.StopFlag) -> int | None:
    """None when all ranks have started; the exit code when this one is asked to stop before that.

    No rank may talk to the parent's store before the last one is forked: a thread of the store looks up the address
    of whoever connects, and a rank forked at that instant finds the C library's resolver locked for ever.
    """
    while not (control / "go").exists():
        if flag.requested is not None:
            return signals.exit_code(flag.requested)
        time.sleep(0.005)
    return None


def _call(fn: Callable[..., int | None], args: tuple[Any, ...]) -> int:
    try:
        return fn(*args) or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0


def has_returned(control: Path, rank: int) -> bool:
    """Whether the function of `rank` has returned."""
    return (control / f"{rank}.returned").exists()


def read_failures(control: Path) -> list[Failure]:
    """The failures that ranks have reported in `control`."""
    return [Failure(**json.loads(path.read_text())) for path in sorted(control.glob("*.failure"))]


def read_pids(control: Path) -> dict[int, int]:
    """Rank to process id of the ranks that have started."""
    return {int(path.stem): int(path.read_text()) for path in control.glob("*.pid")}


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, which may be too busy dying to do it."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _redirect_output(log: int) -> None:
    """Sends what this process and its native libraries print to `log`."""
    _flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)


def _fail(rank: int, error: BaseException, control: Path, log: int) -> NoReturn:
    """Reports `error` and ends the process, without the tear-down, in which a broken communicator may hang."""
    at = time.monotonic()
    trace = "".join(traceback.format_exception(error))
    os.write(log, trace.encode())
    kinds = [kind.__name__ for kind in type(error).__mro__]
    failure = Failure(rank, at, kinds, str(error), trace, echo=_is_echo(error))
    _publish(control / f"{rank}.failure", json.dumps(vars(failure)))
    _flush()
    os._exit(error.exit_code if isinstance(error, KumiError) else 1)


def _is_echo(error: BaseException) -> bool:
    if isinstance(error, CommunicationError | ConnectionError | TimeoutError):
        return True
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _ECHOES)


def _publish(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(text)
    draft.rename(path)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
