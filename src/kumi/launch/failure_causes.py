"""Find the rank whose failure caused the failures of the other ranks, and the error to show for it.

Causes are of four classes. A primary failure is an error of the rank itself, or a signal that killed the rank. An
unclear death is an exit that a failing peer may have caused: by SIGABRT, by SIGTERM, or with an unknown code. A
secondary failure is an error that another rank's failure may have caused: a lost connection, a timeout. The cause is
unknown if no rank left an error or died by itself.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import kumi.errors
from kumi.errors import CommunicationError, DeviceMemoryError, KumiError
from kumi.launch.control_folder import Failure, log_path
from kumi.launch.watch import RankDeath, Watch

PRIMARY, UNCLEAR, SECONDARY, UNKNOWN = range(4)  # classes of causes; the root cause is of the lowest class
_TRACE_LINES = 12  # lines of a traceback in an error's message
# The beginning of the names of the files with the last collectives of a rank, which NCCL writes when one times out.
FLIGHT_RECORDER = "flight_recorder_"
# gloo raises plain RuntimeErrors, both if a peer's process has ended and if a peer does not respond in time.
_CLOSED = ("closed by peer", "connection reset", "connection refused", "broken pipe", "pair closure")
_TIMEOUT = ("timed out", "timeout", "failed to pass monitoredbarrier")


@dataclass(frozen=True)
class RootCause:
    """Why the ranks of this machine failed: the error to show, its class, and the monotonic time of the failure.

    `waiting`: the rank that failed, if it timed out in a collective. `silent`: ranks that the launcher killed before
    they reported anything -> unusual state of their process, or "".
    """

    error: KumiError
    severity: int
    at: float
    waiting: int | None = None
    silent: Mapping[int, str] = field(default_factory=dict)


def is_secondary(error: BaseException) -> bool:
    """Return True if `error` may be a consequence of another rank's failure."""
    if isinstance(error, CommunicationError | ConnectionError | TimeoutError):
        return True
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in (*_CLOSED, *_TIMEOUT))


def is_timeout(message: str) -> bool:
    """Return True if the `message` of a secondary failure reports a timeout."""
    return any(word in message.lower() for word in _TIMEOUT)


def connection_lost_error(rank: int, error: BaseException | str) -> CommunicationError:
    """Return the error for `rank`, whose communication failed with `error` while no other rank reported a cause."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return CommunicationError(
        f"rank {rank} lost the connection to another rank ({words[0]}), and no rank reported a cause; look for the "
        f"cause in the output of the other ranks"
    )


def rank_timeout_error(ranks: dict[int, str], *, waiting: int) -> CommunicationError:
    """Return the error of rank `waiting`, which timed out waiting for `ranks` (rank -> process state, or "")."""
    names = " and ".join(f"rank {rank}{f' ({state})' if state else ''}" for rank, state in sorted(ranks.items()))
    them, they = ("that rank", "it was") if len(ranks) == 1 else ("those ranks", "they were")
    return CommunicationError(
        f"{names} did not join a collective in which rank {waiting} waited for train.timeout_s seconds; look for the "
        f"cause on {them}, raise train.timeout_s if {they} only slow, and run the same command again to resume from "
        f"the last checkpoint"
    )


def root_cause(
    watch: Watch, exits: dict[int, int], failures: list[Failure], log_dir: Path, *, out_of_memory: bool
) -> RootCause:
    """Return the failure of the rank that caused the others: the earliest primary failure.

    Without one, it is the earliest unclear death, else the earliest secondary failure (see the module docstring).

    `exits`: exit codes that the agent saw, by rank. `out_of_memory`: the kernel killed processes during the run
    because memory ran out.
    """
    reported = {failure.rank for failure in failures}
    deaths = [death if death.code is not None else replace(death, code=exits.get(death.rank)) for death in watch.deaths]
    crashes = [death for death in deaths if death.rank not in reported | set(watch.killed)]
    # gloo aborts a process whose peer sends fewer bytes than expected.
    unclear = (None, -signal.SIGABRT, -signal.SIGTERM)
    causes: list[tuple[int, float, Failure | RankDeath]] = [
        *((SECONDARY if failure.secondary else PRIMARY, failure.at, failure) for failure in failures),
        *((UNCLEAR if death.code in unclear else PRIMARY, death.at, death) for death in crashes),
    ]
    silent = {rank: state for rank, state in watch.killed.items() if rank not in reported}
    if not causes:
        error: KumiError = CommunicationError(f"a rank ended without reporting a cause; see the logs in {log_dir}")
        return RootCause(error, UNKNOWN, 0.0, silent=silent)
    severity, at, cause = min(causes, key=lambda candidate: candidate[:2])
    if isinstance(cause, RankDeath):
        words = _exception_message(log_path(log_dir, cause.rank))
        error = _death_error(cause, log_dir, out_of_memory=out_of_memory)
    else:
        words = cause.message if cause.secondary else ""
        error = _rank_error(cause, log_dir)
    waiting = cause.rank if is_timeout(words) else None  # on a timeout, NCCL aborts the rank and gloo raises
    if silent and waiting is not None:
        return RootCause(rank_timeout_error(silent, waiting=waiting), severity, at, waiting, silent)
    # If all ranks of this machine timed out, they waited for each other or for a rank of another machine.
    return RootCause(error, severity, at, waiting, silent)


def _rank_error(failure: Failure, log_dir: Path) -> KumiError:
    """Rebuild the rank's KumiError; for any other error, return a KumiError with the end of its traceback."""
    for name in failure.kinds:
        kind = getattr(kumi.errors, name, None)
        if isinstance(kind, type) and issubclass(kind, KumiError):
            return kind(failure.message)
    if failure.secondary:
        return connection_lost_error(failure.rank, failure.message)
    tail = "\n".join(failure.trace.rstrip().splitlines()[-_TRACE_LINES:])
    return KumiError(
        f"rank {failure.rank} failed unexpectedly; the full traceback is in {log_path(log_dir, failure.rank)}\n{tail}"
    )


def _death_error(death: RankDeath, log_dir: Path, *, out_of_memory: bool) -> KumiError:
    """Return the error for a rank that ended without a report. `out_of_memory`: see `root_cause`."""
    log = log_path(log_dir, death.rank)
    if death.code is None or death.code >= 0:
        code = "an unknown exit code" if death.code is None else f"exit code {death.code}"
        return CommunicationError(f"rank {death.rank} ended with {code} without reporting a cause; see {log}")
    try:
        name = signal.Signals(-death.code).name
    except ValueError:
        name = "a real-time signal"
    if -death.code == signal.SIGKILL and out_of_memory:
        return DeviceMemoryError(
            f"rank {death.rank} was killed by the kernel because this machine ran out of memory; use fewer ranks on "
            f"this machine, layout.zero=3, layout.recompute=full or a smaller layout.microbatch; its log is {log}"
        )
    hint = f"{_exception_message(log)}see {log}{_recorded_collectives(log_dir)}"
    if -death.code == signal.SIGKILL:
        hint = f"the kernel kills processes when memory runs out (see `dmesg`): use less memory per rank; see {log}"
    return CommunicationError(f"rank {death.rank} was killed by signal {-death.code} ({name}); {hint}")


def _recorded_collectives(log_dir: Path) -> str:
    """Return where NCCL wrote the last collectives of the ranks when one timed out; "" if it has not."""
    written = any(log_dir.glob(f"{FLIGHT_RECORDER}*"))
    return f", and the last collectives of each rank in {log_dir / FLIGHT_RECORDER}*" if written else ""


def _exception_message(log: Path) -> str:
    """Return the message of the C++ exception that ended a rank, from the end of its log; "" without one."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2**16))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if "what():" in line]
    return lines[-1].partition("what():")[2].strip() + "; " if lines else ""
