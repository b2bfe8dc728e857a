"""Rendezvous of ranks that an outside launcher started, before their process group exists and when a rank fails.

The ranks communicate through the TCPStore at MASTER_ADDR:MASTER_PORT, which torchrun or else rank 0 serves.

    prepare   rank 0 prepares the data, however long that takes; the other ranks wait for its message
    ready     all ranks wait for each other, then make their process group, whose timeout is too short for preparing
    train
    failed    the first rank with a failure of its own stores the cause, which the other ranks read

Each rank sends a heartbeat until all are ready, so the others notice a dead rank within a minute and do not mistake a
slow rank for a dead one. If rank 0 serves the store, rank 0 keeps it open until the other ranks have read its message,
or for a limited time.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

from kumi.errors import CommunicationError, KumiError
from kumi.launch.failure_causes import connection_lost_error, is_secondary, is_timeout, rank_timeout_error
from kumi.launch.standing import LaunchedRank

_ARRIVAL_SECONDS = 600.0  # all ranks must have connected by then
_SILENCE_SECONDS = 60.0  # a rank counts as dead after this long without a heartbeat
_BEAT_SECONDS = 2.0
_POLL_SECONDS = 0.05
# A rank that lost its connection waits this long for the failing rank to store the cause.
_SETTLE_SECONDS = 3.0
_CONSEQUENCE_SECONDS = 1.2  # a rank with a secondary failure ends this long after reading the cause
# If rank 0 serves the store, it waits at most this long for ranks that have not read its message or its failure.
_LINGER_SECONDS = 60.0
_FAILURE_LINGER_SECONDS = 5.0

_count = itertools.count()  # numbers the rendezvous of this process, equally on all ranks


class Rendezvous:
    """The launched ranks as seen from one of them. `store`: a prefixed client of the TCPStore, which this rank may
    serve."""

    def __init__(self, launched: LaunchedRank, store: Any, *, serves: bool) -> None:
        self.rank, self._size, self._store, self._serves = launched.rank, launched.world_size, store, serves
        self._acknowledged = False
        self._beats: dict[int, tuple[bytes, float]] = {}  # other rank -> its last heartbeat, and when it came
        self._began = time.monotonic()
        self._all_ready = threading.Event()
        threading.Thread(target=self._beat, name="kumi-beat", daemon=True).start()

    def broadcast(self, message: str) -> None:
        """Send `message` to all other ranks. For rank 0."""
        self._store.set("message", message)

    def receive(self) -> str:
        """Wait for the message of rank 0 and return it. Raise CommunicationError if rank 0 failed or died.

        For ranks other than 0.
        """
        while not self._store.check(["message"]):
            self._check_alive([0])
            time.sleep(_POLL_SECONDS)
        message = str(self._store.get("message").decode())
        self._acknowledge()
        return message

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this. Raise CommunicationError if a rank failed, died or never connected."""
        self._store.set(f"ready/{self.rank}", "")
        self._store.add("ready", 1)
        while self._store.add("ready", 0) < self._size:
            # Rank 0 checks all others, and they check rank 0: with thousands of ranks, a store cannot serve more
            # requests.
            missing = [rank for rank in range(self._size) if not self._has("ready", rank)] if self.rank == 0 else [0]
            self._check_alive(missing)
            time.sleep(_POLL_SECONDS)
        self._all_ready.set()

    def linger(self, seconds: float) -> None:
        """If this rank serves the store, wait at most `seconds` until all others have read its message or ended."""
        until = time.monotonic() + seconds
        while self._serves and time.monotonic() < until and self._store.add("acknowledged", 0) < self._size - 1:
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Stop the heartbeat, and tell rank 0 that this rank needs nothing more from it."""
        self._all_ready.set()
        with suppress(RuntimeError):  # the process that served the store has ended
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Tell rank 0, once, that this rank needs no message from it any more."""
        if self.rank and not self._acknowledged:
            self._acknowledged = True
            self._store.add("acknowledged", 1)

    def explain_failure(self, error: BaseException) -> BaseException:
        """Return the error to raise on this rank.

        A primary `error` is stored for the other ranks and returned. For a secondary one, return its cause.
        """
        try:
            if not is_secondary(error):
                reason = {"rank": self.rank, "error": f"{type(error).__name__}: {error}"}
                self._store.compare_set("failed", "", json.dumps(reason))
                return error
            return self._cause(error)
        except RuntimeError:  # the process that served the store has ended
            return connection_lost_error(self.rank, error) if is_secondary(error) else error

    def _cause(self, error: BaseException) -> BaseException:
        """Return the cause of the secondary failure `error`: another rank's failure, or the ranks that timed out."""
        timed_out = is_timeout(str(error))
        if timed_out:
            self._store.set(f"timed_out/{self.rank}", "")
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            if self._store.check(["failed"]):
                cause = self._failure()
                # torchrun shows the earliest report, in full seconds; other ranks may still be reading the store.
                time.sleep(_CONSEQUENCE_SECONDS)
                return cause
            time.sleep(_POLL_SECONDS)
        silent = [rank for rank in range(self._size) if not self._has("timed_out", rank)] if timed_out else []
        if silent:
            return rank_timeout_error(dict.fromkeys(silent, ""), waiting=self.rank)
        return error if isinstance(error, KumiError) else connection_lost_error(self.rank, error)

    def _failure(self) -> CommunicationError:
        reason = json.loads(self._store.get("failed"))
        return CommunicationError(f"rank {self.rank} ends because rank {reason['rank']} failed: {reason['error']}")

    def _check_alive(self, ranks: list[int]) -> None:
        """Raise CommunicationError if any rank has failed, or if one of `ranks` never connected or stopped its
        heartbeat."""
        if self._store.check(["failed"]):
            raise self._failure()
        now = time.monotonic()
        absent = []
        for rank in ranks:
            if not self._has("beat", rank):
                absent.append(rank)
                continue
            beat, (before, since) = self._store.get(f"beat/{rank}"), self._beats.get(rank, (b"", now))
            if beat != before:
                self._beats[rank] = (beat, now)
            elif now - since > _SILENCE_SECONDS:
                raise CommunicationError(
                    f"rank {rank} died or hangs before training began: it has sent no heartbeat for "
                    f"{_SILENCE_SECONDS:.0f} s; see its output"
                )
        if absent and now - self._began > _ARRIVAL_SECONDS:
            raise CommunicationError(
                f"rank {', '.join(map(str, absent))} of {self._size} did not connect within {_ARRIVAL_SECONDS:.0f} s; "
                f"check that all {self._size} ranks were started, and that they can reach "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            )

    def _has(self, key: str, rank: int) -> bool:
        return bool(self._store.check([f"{key}/{rank}"]))

    def _beat(self) -> None:
        """Send heartbeats until all ranks are ready."""
        count = 0
        with suppress(RuntimeError):  # the process that served the store has ended; the main thread notices it, too
            while True:
                self._store.set(f"beat/{self.rank}", str(count))
                count += 1
                if self._all_ready.wait(_BEAT_SECONDS):
                    return


@contextmanager
def rendezvous(launched: LaunchedRank) -> Iterator[Rendezvous]:
    """Open the rendezvous of all ranks that the launcher started, for the duration of the block.

    An exception in the block is stored for the other ranks and reported to torchrun. If it is only a consequence of
    another rank's failure, raise a CommunicationError with the cause instead. Raise CommunicationError if the store
    cannot be reached.
    """
    peers = _open(launched)
    try:
        yield peers
        peers.linger(_LINGER_SECONDS)
    except Exception as error:
        _end(peers, error)
    finally:
        peers.end()


def _open(launched: LaunchedRank) -> Rendezvous:
    """Connect to the store, which rank 0 serves unless torchrun does, and return a new rendezvous on it."""
    from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

    serves = launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        store = _connect(host, int(port), launched.world_size, serves)
    except (DistError, ValueError) as error:
        raise CommunicationError(
            f"rank {launched.rank} of {launched.world_size} cannot reach rank 0 at {host}:{port} ({error}); check that "
            f"rank 0 runs there, and that this machine can reach the address"
        ) from error
    # torchrun serves one store to all its attempts, and a store serves every rendezvous of an attempt.
    prefix = f"kumi/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_count)}"
    return Rendezvous(launched, PrefixStore(prefix, store), serves=serves)


@cache
def _connect(host: str, port: int, size: int, serves: bool) -> Any:
    """Connect to the store. The cache keeps it open for the next rendezvous, which other ranks may already have begun
    when rank 0 ends the present one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        host,
        port,
        size,
        is_master=serves,
        multi_tenant=serves,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ARRIVAL_SECONDS),
    )


def _end(peers: Rendezvous, error: Exception) -> NoReturn:
    """Raise `error` or its cause, and have the process end without tear-down, in which broken groups may hang."""
    import torch.distributed as dist

    cause = peers.explain_failure(error)
    _write_error_file(cause, error)
    with suppress(RuntimeError):
        peers.linger(_FAILURE_LINGER_SECONDS)
    if dist.is_initialized():
        atexit.register(_leave, cause.exit_code if isinstance(cause, KumiError) else 1)
    if cause is error:
        raise error
    raise cause from error


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _write_error_file(cause: BaseException, error: BaseException) -> None:
    """Write the failure to torchrun's error file, in its format. torchrun shows `py_callstack`."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    sentence = f"{type(cause).__name__}: {cause}"
    shown = sentence if isinstance(cause, KumiError) else "".join(traceback.format_exception(error))
    extra = {"py_callstack": shown, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(file, "w") as report:
        json.dump({"message": {"message": sentence, "extraInfo": extra}}, report)
