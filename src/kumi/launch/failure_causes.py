"""Cause or consequence: how the failure of one rank reads in another, and the sentence for it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import kumi.errors
from kumi.errors import CommunicationError, DeviceMemoryError, KumiError
from kumi.launch.control_folder import Failure, log_path
from kumi.launch.watch import Death, Watch

_TRACE_LINES = 12
# gloo raises bare RuntimeErrors: where a peer's process has ended, and where a peer does not come in time.
_CLOSED = ("closed by peer", "connection reset", "connection refused", "broken pipe", "pair closure")
_LATE = ("timed out", "timeout", "failed to pass monitoredbarrier")


def is_echo(error: BaseException) -> bool:
    """Whether `error` may be the consequence of another rank's failure."""
    if isinstance(error, CommunicationError | ConnectionError | TimeoutError):
        return True
    if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in (*_CLOSED, *_LATE))


def is_late(message: str) -> bool:
    """Whether the text of an echo says that another rank did not come in time."""
    return any(word in message.lower() for word in _LATE)


def lost(rank: int, error: BaseException | str) -> CommunicationError:
    """The error of `rank` where a communication with others ended in `error`, and no other rank has given a reason."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return CommunicationError(
        f"rank {rank} lost the connection to another rank ({words[0]}), which has not said why it ended; see the "
        f"output of the other ranks"
    )


def late(ranks: dict[int, str], *, waited: int) -> CommunicationError:
    """The error where the rank `waited` gave up because of `ranks`: rank to the state of its process, or ''."""
    named = " and ".join(f"rank {rank}{f' ({state})' if state else ''}" for rank, state in sorted(ranks.items()))
    return CommunicationError(
        f"{named} did not come to a communication in which rank {waited} waited until train.timeout_s was over; see "
        f"why there, raise train.timeout_s if it was only slow, and run the same command again: it goes on from the "
        f"last checkpoint"
    )


def first_error(
    watch: Watch, exits: dict[int, int], failures: list[Failure], log_dir: Path, *, out_of_memory: bool
) -> KumiError:
    """The error of the rank that failed first, and of those the one that no other rank's failure explains.

    `out_of_memory`: the system killed processes during the run because memory ran out.
    """
    reported = {failure.rank for failure in failures}
    deaths = [death if death.code is not None else replace(death, code=exits.get(death.rank)) for death in watch.deaths]
    crashes = [death for death in deaths if death.rank not in reported | set(watch.killed)]
    # Least likely a consequence first. gloo aborts a process whose peer sends less than was agreed.
    unclear = (None, -signal.SIGABRT, -signal.SIGTERM)
    causes: list[tuple[int, float, Failure | Death]] = [
        *((2 if failure.echo else 0, failure.at, failure) for failure in failures),
        *((1 if death.code in unclear else 0, death.at, death) for death in crashes),
    ]
    if not causes:
        return CommunicationError(f"a rank ended without saying why; see the logs in {log_dir}")
    cause = min(causes, key=lambda one: one[:2])[2]
    silent = {rank: state for rank, state in watch.killed.items() if rank not in reported}
    words = _last_words(log_path(log_dir, cause.rank)) if isinstance(cause, Death) else cause.echo * cause.message
    if silent and is_late(words):  # NCCL ends a rank that waited in vain by SIGABRT, gloo raises
        return late(silent, waited=cause.rank)
    if isinstance(cause, Death):
        return _crash(cause, log_dir, out_of_memory=out_of_memory)
    return _reported(cause, log_dir)


def _reported(failure: Failure, log_dir: Path) -> KumiError:
    """The rank's KumiError again, or a KumiError with the end of its traceback."""
    for name in failure.kinds:
        kind = getattr(kumi.errors, name, None)
        if isinstance(kind, type) and issubclass(kind, KumiError):
            return kind(failure.message)
    if failure.echo:
        return lost(failure.rank, failure.message)
    tail = "\n".join(failure.trace.rstrip().splitlines()[-_TRACE_LINES:])
    return KumiError(
        f"rank {failure.rank} failed unexpectedly; all of it is in {log_path(log_dir, failure.rank)}\n{tail}"
    )


def _crash(death: Death, log_dir: Path, *, out_of_memory: bool) -> KumiError:
    log = log_path(log_dir, death.rank)
    if death.code is None or death.code >= 0:
        return CommunicationError(f"rank {death.rank} ended with exit code {death.code} without saying why; see {log}")
    try:
        name = signal.Signals(-death.code).name
    except ValueError:
        name = "a real-time signal"
    if -death.code == signal.SIGKILL and out_of_memory:
        return DeviceMemoryError(
            f"rank {death.rank} was killed by the system because memory ran out; use fewer ranks on this machine, "
            f"layout.zero=3, layout.recompute=full or a smaller layout.microbatch; its log is {log}"
        )
    hint = f"{_last_words(log)}see {log}"
    if -death.code == signal.SIGKILL:
        hint = f"the system does that when memory runs out (see `dmesg`): use less memory per rank; its log is {log}"
    return CommunicationError(f"rank {death.rank} was killed by signal {-death.code} ({name}); {hint}")


def _last_words(log: Path) -> str:
    """What a C++ exception said that ended a rank, from the end of its log; empty when there was none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2**16))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if "what():" in line]
    return lines[-1].partition("what():")[2].strip() + "; " if lines else ""
