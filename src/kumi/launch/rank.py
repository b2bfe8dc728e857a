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
from typing import Any, TextIO

from kumi.errors import CommunicationError, KumiError
from kumi.launch import signals

_PR_SET_PDEATHSIG = 1
# How the failure of another rank reads in this one, in gloo's and NCCL's words.
_ECHOES = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket",
    "timed out",
    "store",
)


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
    with log_path(start.log_dir, rank).open("a", buffering=1) as log:
        if rank != 0:
            _redirect_output(log)
        faulthandler.enable(file=log)
        flag = signals.install()
        flag.patient = True  # the parent decides when patience ends
        torch.set_num_threads(start.threads)
        _publish(start.control / f"{rank}.pid", str(os.getpid()))
        try:
            code = fn(*args) or 0
        except BaseException as error:
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                code = error.code or 0
            else:
                _fail(rank, error, start, log)
        _flush()
        return code


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


def _redirect_output(log: TextIO) -> None:
    """Sends what this process and its native libraries print to `log`."""
    _flush()
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)


def _fail(rank: int, error: BaseException, start: Start, log: TextIO) -> None:
    """Reports `error` and ends the process, without the tear-down, in which a broken communicator may hang."""
    at = time.monotonic()
    trace = "".join(traceback.format_exception(error))
    log.write(trace)
    kinds = [kind.__name__ for kind in type(error).__mro__]
    failure = Failure(rank, at, kinds, str(error), trace, echo=_is_echo(error))
    _publish(start.control / f"{rank}.failure", json.dumps(vars(failure)))
    _flush()
    os._exit(error.exit_code if isinstance(error, KumiError) else 1)


def _is_echo(error: BaseException) -> bool:
    if isinstance(error, CommunicationError | ConnectionError) or "DistError" in (
        kind.__name__ for kind in type(error).__mro__
    ):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _ECHOES)


def _publish(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(text)
    draft.rename(path)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
