"""Start ranks on this machine and stop them: one call, one exit code, one error.

    CLI --run--> parent: torch's elastic agent + Watch --fork--> rank 0 (terminal), rank 1 ... (log files)

Ranks are forked, so they share the parent's imports and start in a tenth of a second. Once the parent has used CUDA,
ranks are spawned instead, which takes seconds. The parent must not have computed with more than one thread. This module
is the `kumi.launch.launchers.Launcher` for one machine.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

from kumi.config import ResolvedRun
from kumi.config.local_machine import threads_per_rank
from kumi.errors import CommunicationError, RefusedError
from kumi.launch import signals
from kumi.launch.control_folder import control_folder, read_failures
from kumi.launch.failure_causes import root_cause
from kumi.launch.oom import oom_kills
from kumi.launch.rank_process import NodeRanks, RankStart, run_rank
from kumi.launch.standing import LaunchedRank, interface_to, launched_rank, outward_interface, socket_variables
from kumi.launch.watch import Watch
from kumi.process_limits import SLEEPING_THREADS
from kumi.safe_output import replace_missing_output

if TYPE_CHECKING:
    from kumi.launch.agent import HeadLink

# torch's elastic agent, "the agent" in this module, handles only this signal and gives up the ranks. `signals` handles
# the others.
_AGENT_SIGNAL = signal.SIGUSR2
# The names under which a user may have set PyTorch's allocator.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_AGENT_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


name = "local"
max_nodes = 1


def start(run: ResolvedRun, fn: Callable[..., int | None], args: tuple[Any, ...]) -> int:
    """Run `fn(*args)` on every rank of `run` on this machine; return the exit code (see `kumi.launch.launchers`)."""
    return run_ranks(fn, args, nproc=run.cluster.devices_per_node, log_dir=run.out / "logs")


def run_ranks(
    fn: Callable[..., int | None], args: tuple[Any, ...] = (), *, nproc: int, log_dir: Path | str, grace: float = 600.0
) -> int:
    """Run `fn(*args)` on each of `nproc` ranks of this machine and return the run's exit code.

    The exit code is the first non-zero result of `fn`, by rank, or 0. A result None counts as 0.

    `fn` runs in this process if there is one rank, or if torchrun or srun started this process as a rank (RANK and
    WORLD_SIZE are set). `fn` reads its rank from the variables of torch's env://, polls `signals.install()` for a stop
    request, and returns `signals.exit_code(...)` if it stopped. After SIGINT, SIGTERM, SIGHUP or SIGUSR1, `fn` has
    `grace` seconds to return.

    Raise the KumiError of the first failing rank; KumiError with the end of the traceback for any other exception;
    CommunicationError if a rank was killed. `log_dir`/rank_00001.log and so on have the ranks' full output.
    """
    replace_missing_output()  # ranks flush and ask whether there is a terminal
    if nproc == 1 or is_rank(os.environ):
        with signals.installed():
            return fn(*args) or 0
    log_dir = Path(log_dir).absolute()
    log_dir.mkdir(parents=True, exist_ok=True)
    return _run_under_agent(fn, args, nproc, log_dir, grace, None)


def run_node_ranks(
    fn: Callable[..., int | None],
    args: tuple[Any, ...],
    *,
    nproc: int,
    log_dir: Path,
    link: HeadLink,
    grace: float = 600.0,
) -> int:
    """Run `fn(*args)` on each of the `nproc` ranks of this node of several, and return this node's exit code.

    All nodes must have called `link.wait_for_all()`. It is like `run_ranks`, but ranks are also ended if the link to
    the head is lost, or the head says so.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with link.watching():
        return _run_under_agent(fn, args, nproc, log_dir.absolute(), grace, link)


def is_rank(environ: Mapping[str, str]) -> bool:
    """Return True if an outside launcher started this process as a rank."""
    return launched_rank(environ) is not None


def rank_environment(nproc: int, environ: Mapping[str, str], *, nodes: int = 1) -> dict[str, str]:
    """Return the variables that `nproc` ranks of this machine need and that `environ` does not set.

    OMP_NUM_THREADS, OMP_WAIT_POLICY and PYTORCH_ALLOC_CONF take effect only if they are set before torch is imported.
    Ranks that kumi starts communicate over the loopback interface, if this machine is the only one of `nodes`; ranks of
    an outside launcher, over the interface that leads to rank 0.
    """
    variables = {
        **SLEEPING_THREADS,  # spinning threads would take the cores from the other ranks
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting GPUs must not start CUDA in the parent: a fork cannot use it
    }
    if not any(name in environ for name in _ALLOCATOR_VARIABLES):
        # Without segments that grow, microbatches of different sizes leave holes in a GPU's memory.
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if nproc > 1:
        variables["OMP_NUM_THREADS"] = str(threads_per_rank(nproc, environ))
    launched = launched_rank(environ)
    if launched is not None:
        variables |= launched.torch_environment()
        variables |= socket_variables(_interface(launched, nproc, environ), environ.get("MASTER_ADDR", ""), environ)
    elif nproc > 1 and nodes == 1:
        variables |= socket_variables("lo0" if sys.platform == "darwin" else "lo", "127.0.0.1", environ)
    return {name: value for name, value in variables.items() if name not in environ}


def _interface(launched: LaunchedRank, nproc: int, environ: Mapping[str, str]) -> str | None:
    """Return the network interface for the ranks of an outside launcher; None leaves the choice to gloo.

    On many systems a machine's own name resolves to a loopback address, which other machines cannot reach.
    """
    if launched.world_size == 1:
        return None
    interface = interface_to(environ["MASTER_ADDR"])
    return outward_interface() if interface == "lo" and launched.world_size > nproc else interface


def _run_under_agent(
    fn: Callable[..., int | None], args: tuple[Any, ...], nproc: int, log_dir: Path, grace: float, link: HeadLink | None
) -> int:
    """Start `nproc` ranks and return their exit code, or raise the error of the root cause; see `run_ranks`.

    `link`: the link to the head, in a run on several nodes.
    """
    environ_before, kills_before = dict(os.environ), oom_kills()
    threads = threads_per_rank(nproc, os.environ)
    os.environ.update(_environment(nproc, environ_before, link))
    place = None if link is None else _place(link, nproc)
    try:
        with control_folder(log_dir) as control:
            start = RankStart(control, log_dir, os.getpid(), threads, place)
            with (
                _quiet_agent(),
                signals.installed() as flag,
                Watch(control, nproc, flag, grace, _AGENT_SIGNAL, link) as watch,
            ):
                flag.patient = True  # the watch ends the ranks
                codes, exits = _run_elastic_agent(nproc, fn, args, start)
            if codes is not None:
                return next((code for code in codes if code), 0)
            if flag.requested is not None and (flag.insisted or watch.out_of_grace):
                if link is not None:
                    link.forced = flag.insisted
                return _forced_stop_code(flag, grace)
            out_of_memory = oom_kills() != kills_before
            cause = root_cause(watch, exits, read_failures(control), log_dir, out_of_memory=out_of_memory)
            if link is not None:
                link.cause = cause
            raise cause.error
    finally:
        for name in set(os.environ) - set(environ_before):  # the variables above, and one that torch's agent sets
            del os.environ[name]


def _environment(nproc: int, environ: Mapping[str, str], link: HeadLink | None) -> dict[str, str]:
    """Return the variables of `rank_environment`, and those of the interface to the other nodes."""
    if link is None:
        return rank_environment(nproc, environ)
    variables = rank_environment(nproc, environ, nodes=link.standing.nodes)
    return variables | socket_variables(link.interface, link.address, environ)


def _place(link: HeadLink, nproc: int) -> NodeRanks:
    return NodeRanks(link.standing.node, link.standing.nodes, nproc, link.standing.head.host, link.port)


def _run_elastic_agent(
    nproc: int, fn: Callable[..., int | None], args: tuple[Any, ...], start: RankStart
) -> tuple[list[int] | None, dict[int, int]]:
    """Run the ranks under torch's elastic agent.

    Return the exit codes of all ranks of this machine, and {}; if a rank failed, None and the exit codes that the agent
    saw, by rank. The agent knows the ranks of this machine alone.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The kernel chooses a port, which stays bound. The agent and the ranks use this store.
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
        first = 0 if start.place is None else start.place.first
        return None, {first + rank: failure.exitcode for rank, failure in error.failures.items()}
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        # The agent's queue to its ranks needs a semaphore, a file of a few bytes in /dev/shm.
        raise RefusedError(
            "/dev/shm: no space is left for the semaphores that start the ranks; delete the files that dead processes "
            "left there, or enlarge it (`mount -o remount,size=1G /dev/shm`, `docker run --shm-size=1g`)"
        ) from error
    except SignalException:
        return None, {}
    finally:
        signal.signal(_AGENT_SIGNAL, before)
        del store
    return [results[rank] for rank in sorted(results)], {}


def can_fork() -> bool:
    """Return True if a forked rank can use this process's libraries: not on macOS, nor after a GPU was used here."""
    from kumi.accelerator import driver_has_started

    return sys.platform == "linux" and not driver_has_started()


def _no_agent_logs() -> Any:
    """Return the agent's log setting that leaves the ranks' output alone: `run_rank` redirects it."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class NoLogs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            none, nowhere = dict.fromkeys(envs, ""), dict.fromkeys(envs, os.devnull)
            return LogsDest(stdouts=none, stderrs=none, error_files=nowhere)

        @property
        def root_log_dir(self) -> str:
            return os.devnull

    return NoLogs()


def _forced_stop_code(flag: signals.StopFlag, grace: float) -> int:
    """Return the exit code after a second stop request; raise CommunicationError if the grace period ran out."""
    assert flag.requested is not None
    if flag.insisted:
        return signals.exit_code(flag.requested)
    name = signal.Signals(flag.requested).name
    raise CommunicationError(
        f"the ranks did not stop within {grace:.0f} s of {name} and were killed; run the same command again to resume "
        f"from the last complete checkpoint"
    )


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's logs and warnings: `run_ranks` reports failures in one sentence."""
    import torch.distributed.launcher.api  # noqa: F401  (creates the agent's loggers)

    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(_AGENT_LOGGERS) and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn; the threads here (the store's, the watch's) hold no lock that a rank needs.
            warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
            # A program may have replaced sys.stderr by a stream without a descriptor. `run_rank` enables the handler.
            warnings.filterwarnings("ignore", message="Unable to enable fault handler")
            yield
    finally:
        for logger in loggers:
            logger.disabled = False
