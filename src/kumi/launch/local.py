"""Starting ranks on this machine, and stopping them: one call, one exit code, one error.

    CLI --run--> parent: torch's elastic agent + Watch --fork--> rank 0 (terminal), rank 1 ... (log files)

Ranks are forked, so they have the parent's imports and start in a tenth of a second; the parent must not have used
CUDA (it is spawned from then on, which takes seconds) and must not have computed with more than one thread.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kumi.config import ResolvedRun
from kumi.config.local_machine import threads_per_rank
from kumi.errors import CommunicationError, RefusedError
from kumi.launch import signals
from kumi.launch.control_folder import control_folder, read_failures
from kumi.launch.failure_causes import first_error
from kumi.launch.oom import memory_kills
from kumi.launch.rank_process import Start, run_rank
from kumi.launch.standing import Standing, interface_to, outward_interface, standing
from kumi.launch.watch import Watch

# The one signal that is left to the agent: it makes it give up. The others are for `signals`.
_AGENT_SIGNAL = signal.SIGUSR2
_CUDA_ERROR_NOT_INITIALIZED = 3
_NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


name = "local"
most_nodes = 1


def start(run: ResolvedRun, fn: Callable[..., int | None], args: tuple[Any, ...]) -> int:
    """Have every rank of `run` on this machine do `fn(*args)`; its exit code (see `kumi.launch.launchers`)."""
    return run_ranks(fn, args, nproc=run.cluster.devices_per_node, log_dir=run.out / "logs")


def run_ranks(
    fn: Callable[..., int | None], args: tuple[Any, ...] = (), *, nproc: int, log_dir: Path | str, grace: float = 600.0
) -> int:
    """The exit code that `fn(*args)` returns (None is 0), run as each of `nproc` ranks of this machine.

    With one rank, or as a rank that torchrun or srun has started (RANK and WORLD_SIZE are set), `fn` runs in this
    process. `fn` finds its rank where torch's env:// finds it, asks `signals.install()` whether to stop, and returns
    `signals.exit_code(...)` when it did. After SIGINT, SIGTERM, SIGHUP or SIGUSR1 it has `grace` seconds for that.

    Raises the first failing rank's KumiError; KumiError with the end of the traceback for any other exception; and
    CommunicationError for a rank that was killed. The rest is in `log_dir`/rank_00001.log and so on.
    """
    if nproc == 1 or is_rank(os.environ):
        with signals.installed():
            return fn(*args) or 0
    log_dir = Path(log_dir).absolute()
    log_dir.mkdir(parents=True, exist_ok=True)
    return _run_under_agent(fn, args, nproc, log_dir, grace)


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return standing(environ) is not None


def environment(nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that `nproc` ranks of this machine need and `environ` does not set.

    OMP_NUM_THREADS and OMP_WAIT_POLICY count only when they are set before torch is imported. Ranks that kumi starts
    meet on the loopback interface; those of an outside launcher, on the one that leads to the host of rank 0.
    """
    wanted = {
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait take the cores from the other ranks
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not start CUDA in the parent: a fork cannot use it
    }
    if nproc > 1:
        wanted["OMP_NUM_THREADS"] = str(threads_per_rank(nproc, environ))
    place = standing(environ)
    if place is not None:
        wanted |= place.environment()
        interface = _interface(place, nproc, environ)
        wanted |= {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
    elif nproc > 1:
        wanted["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {name: value for name, value in wanted.items() if name not in environ}


def _interface(place: Standing, nproc: int, environ: Mapping[str, str]) -> str | None:
    """The network interface on which the ranks of an outside launcher reach each other; None leaves it to gloo.

    On many systems a machine's own name stands for a loopback address, where no other machine reaches it.
    """
    if place.world_size == 1:
        return None
    found = interface_to(environ["MASTER_ADDR"])
    return outward_interface() if found == "lo" and place.world_size > nproc else found


def _run_under_agent(
    fn: Callable[..., int | None], args: tuple[Any, ...], nproc: int, log_dir: Path, grace: float
) -> int:
    before, killed_before = dict(os.environ), memory_kills()
    threads = threads_per_rank(nproc, os.environ)
    os.environ.update(environment(nproc, before))
    try:
        with control_folder(log_dir) as control:
            with (
                _quiet_agent(),
                signals.installed() as flag,
                Watch(control, nproc, flag, grace, _AGENT_SIGNAL) as watch,
            ):
                flag.patient = True
                codes, exits = _elastic(nproc, fn, args, Start(control, log_dir, os.getpid(), threads))
            if codes is not None:
                return next((code for code in codes if code), 0)
            if flag.requested is not None and (flag.insisted or watch.out_of_grace):
                return _stopped_hard(flag, grace)
            out_of_memory = memory_kills() != killed_before
            raise first_error(watch, exits, read_failures(control), log_dir, out_of_memory=out_of_memory)
    finally:
        for name in set(os.environ) - set(before):  # the agent leaves one of its own, too
            del os.environ[name]


def _elastic(
    nproc: int, fn: Callable[..., int | None], args: tuple[Any, ...], start: Start
) -> tuple[list[int] | None, dict[int, int]]:
    """What the ranks returned under torch's elastic agent; None, and the exit codes it saw, when one failed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The kernel chooses the port, and it stays bound: the agent finds this store in its process and the ranks use it.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, 1, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=start.control.name,
        role="kumi",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork" if can_fork() else "spawn",
        logs_specs=_no_agent_logs(),
        signals_to_handle=_AGENT_SIGNAL.name,
    )
    before = signal.getsignal(_AGENT_SIGNAL)
    try:
        results = elastic_launch(config, run_rank)(fn, args, start)
    except ChildFailedError as error:
        return None, {rank: failure.exitcode for rank, failure in error.failures.items()}
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # The agent's queue to its ranks needs a semaphore, a file of a few bytes there.
        raise RefusedError(
            "/dev/shm: no space is left for the semaphores by which ranks are started; delete what dead processes left "
            "there, or give it more (`mount -o remount,size=1G /dev/shm`, `docker run --shm-size=1g`)"
        ) from error
    except SignalException:
        return None, {}
    finally:
        signal.signal(_AGENT_SIGNAL, before)
        del store
    return [results[rank] for rank in sorted(results)], {}


def can_fork() -> bool:
    """Whether a forked rank can use what this process has loaded: not on macOS, and not once CUDA has started here."""
    import torch

    if sys.platform != "linux" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return True  # nobody has even loaded the driver
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_ERROR_NOT_INITIALIZED)


def _no_agent_logs() -> Any:
    """What tells the agent to leave the ranks' output alone, which `run_rank` directs itself."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class NoLogs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            none, nowhere = dict.fromkeys(envs, ""), dict.fromkeys(envs, os.devnull)
            return LogsDest(stdouts=none, stderrs=none, error_files=nowhere)

        @property
        def root_log_dir(self) -> str:
            return os.devnull

    return NoLogs()


def _stopped_hard(flag: signals.StopFlag, grace: float) -> int:
    """The exit code after the user insisted; CommunicationError when the ranks used up their grace."""
    assert flag.requested is not None
    if flag.insisted:
        return signals.exit_code(flag.requested)
    name = signal.Signals(flag.requested).name
    raise CommunicationError(
        f"the ranks did not stop within {grace:.0f} s of {name} and were killed; the last complete checkpoint counts"
    )


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silences the agent's own reports of what `run_ranks` reports in a sentence."""
    import torch.distributed.launcher.api  # noqa: F401  (its loggers exist from here on)

    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(_NOISY) and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            # Said from Python 3.12 on; the threads here (the store's, the watch's) hold nothing that a rank needs.
            warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
            yield
    finally:
        for logger in loggers:
            logger.disabled = False
