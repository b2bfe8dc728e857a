"""Run a function in a started rank: die with the parent, redirect output, report failures to the launcher."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kumi.errors import KumiError
from kumi.launch import signals
from kumi.launch.control_folder import Failure, announce_rank, log_path, ranks_released, report_failure, report_return
from kumi.launch.failure_causes import is_secondary

_PR_SET_PDEATHSIG = 1  # prctl's number for "the signal of the parent's death"


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one node among those of several. `host` and `port`: of the store that all ranks connect to."""

    node: int
    nodes: int
    ranks: int  # of each node
    host: str
    port: int

    @property
    def first(self) -> int:
        """The lowest rank of the node."""
        return self.node * self.ranks

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return torch's variables for the rank with the number `local_rank` in the node."""
        rank, size = str(self.first + local_rank), str(self.nodes * self.ranks)
        return {
            "RANK": rank,
            "ROLE_RANK": rank,
            "WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True)
class RankStart:
    """What the launcher passes to each rank."""

    control: Path  # control folder
    log_dir: Path
    parent: int  # process id of the launcher
    threads: int  # for computation
    place: NodeRanks | None = None  # in a run on several nodes


def run_rank(fn: Callable[..., int | None], args: tuple[Any, ...], start: RankStart) -> int:
    """Run `fn(*args)` in a started rank and return its exit code; on an error, report a Failure and end the process."""
    import torch

    if start.place is not None:
        os.environ.update(start.place.environment(int(os.environ["LOCAL_RANK"])))
    rank = int(os.environ["RANK"])
    die_with_parent(start.parent)
    log = os.open(log_path(start.log_dir, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    if rank != 0:
        _redirect_output(log)
    faulthandler.enable(file=log)
    flag = signals.install()
    flag.patient = True  # the parent decides when to kill this rank
    torch.set_num_threads(start.threads)
    announce_rank(start.control, rank)
    try:
        code = _await_all(start.control, flag, alone=start.place is None)
        if code is None:
            code = _call(fn, args)
    except BaseException as error:
        _fail(rank, error, start.control, log)
    _flush()
    report_return(start.control, rank, code)
    return code


def _await_all(control: Path, flag: signals.StopFlag, *, alone: bool) -> int | None:
    """Wait until all ranks have started. Return None, or the exit code if a stop signal comes before that.

    `alone`: True if the run has no other node. Otherwise ranks of other nodes may have begun when the signal comes
    here, so this rank begins, too, and all ranks agree to stop in the first step.

    No rank may connect to the parent's store before the last rank is forked: on each connection, a thread of the store
    looks up the client's address, and a rank forked at that instant inherits the C library's resolver lock, locked for
    ever.
    """
    while not ranks_released(control):
        if alone and flag.requested is not None:
            return signals.exit_code(flag.requested)
        time.sleep(0.005)
    return None


def _call(fn: Callable[..., int | None], args: tuple[Any, ...]) -> int:
    """Return the exit code of `fn(*args)`, also if it raises SystemExit with a number."""
    try:
        return fn(*args) or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """On Linux, have the kernel send `signum` to this process when its parent dies, however the parent dies."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(128 + signum)


def _redirect_output(log: int) -> None:
    """Redirect the output of this process and its native libraries to the file descriptor `log`."""
    _flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True, write_through=True)


def _fail(rank: int, error: BaseException, control: Path, log: int) -> NoReturn:
    """Report `error` and end the process without tear-down, in which a broken communicator may hang.

    The report comes first, because later steps may fail.
    """
    at = time.monotonic()
    trace = "".join(traceback.format_exception(error))
    kinds = [kind.__name__ for kind in type(error).__mro__]
    with suppress(OSError):
        report_failure(control, Failure(rank, at, kinds, str(error), trace, secondary=is_secondary(error)))
    with suppress(OSError):  # the disk is full
        os.write(log, trace.encode())
    with suppress(OSError):
        _flush()
    os._exit(error.exit_code if isinstance(error, KumiError) else 1)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
