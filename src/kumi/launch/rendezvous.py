"""Ranks that an outside launcher started: what they tell each other before their group exists, and when one fails.

They meet in the store at MASTER_ADDR:MASTER_PORT, which torchrun serves, or else rank 0.

    prepare   rank 0 prepares the data, however long that takes; the others wait for its word
    ready     all ranks wait for all; only then do they make their group, whose timeout is too short for preparing
    train
    failed    the first rank that fails for a reason of its own leaves it in the store, where the others find it

Each rank beats until all are ready, so that one that died is missed within a minute, and one that is slow is not.
Where rank 0 serves the store, it stays until the others have heard how it ended, or for a while where they do not come.
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
from kumi.launch.failure_causes import is_echo, is_late, late, lost
from kumi.launch.standing import Standing

_ARRIVAL_SECONDS = 600.0  # until all ranks have connected
_SILENCE_SECONDS = 60.0  # without a beat, after which a rank counts as dead
_BEAT_SECONDS = 2.0
_POLL_SECONDS = 0.05
# A rank that lost the others waits this long for the reason of the one that failed first.
_SETTLE_SECONDS = 3.0
_CONSEQUENCE_SECONDS = 1.2  # between a failure and the end of the ranks that it ends
# How long rank 0, where it serves the store, stays for ranks that have not heard its word, or why it failed.
_HEARING_SECONDS = 60.0
_FAILURE_HEARING_SECONDS = 5.0

_meetings = itertools.count()  # of this process; all ranks meet equally often


class Meeting:
    """The ranks of `place`, of which this is one, in `store`: a prefixed client of the TCPStore, which it may serve."""

    def __init__(self, place: Standing, store: Any, *, serves: bool) -> None:
        self.rank, self._size, self._store, self._serves = place.rank, place.world_size, store, serves
        self._heard = False
        self._beats: dict[int, tuple[bytes, float]] = {}  # of other ranks: the last one, and when it came
        self._began = time.monotonic()
        self._all_ready = threading.Event()
        threading.Thread(target=self._beat, name="kumi-beat", daemon=True).start()

    def say(self, word: str) -> None:
        """As rank 0, let the others go on with `word`."""
        self._store.set("word", word)

    def hear(self) -> str:
        """As another rank, the word of rank 0, once it comes. Raises CommunicationError when rank 0 failed or died."""
        while not self._store.check(["word"]):
            self._look_after([0])
            time.sleep(_POLL_SECONDS)
        word = str(self._store.get("word").decode())
        self._count_as_heard()
        return word

    def await_all(self) -> None:
        """Return once all ranks have come here. Raises CommunicationError when one failed, died or never came."""
        self._store.set(f"ready/{self.rank}", "")
        self._store.add("ready", 1)
        while self._store.add("ready", 0) < self._size:
            # Rank 0 looks after all others, which look after it: a store cannot bear more of thousands of ranks.
            self._look_after([0] if self.rank else [rank for rank in range(self._size) if not self._has("ready", rank)])
            time.sleep(_POLL_SECONDS)
        self._all_ready.set()

    def stay(self, seconds: float) -> None:
        """Where this rank serves the store, return once all others have heard its word or ended, or after `seconds`."""
        until = time.monotonic() + seconds
        while self._serves and time.monotonic() < until and self._store.add("heard", 0) < self._size - 1:
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Stop beating."""
        self._all_ready.set()
        with suppress(RuntimeError):  # whoever served the store has gone
            self._count_as_heard()

    def _count_as_heard(self) -> None:
        """Let rank 0 know, once, that this other rank does not need it to learn how to go on."""
        if self.rank and not self._heard:
            self._heard = True
            self._store.add("heard", 1)

    def explained(self, error: BaseException) -> BaseException:
        """Leave the reason why this rank fails in the store; or, where `error` is the echo of another's, find that."""
        try:
            if not is_echo(error):
                reason = {"rank": self.rank, "error": f"{type(error).__name__}: {error}"}
                self._store.compare_set("failed", "", json.dumps(reason))
                return error
            return self._cause(error)
        except RuntimeError:  # the store went with whoever served it
            return lost(self.rank, error) if is_echo(error) else error

    def _cause(self, error: BaseException) -> BaseException:
        """The failure behind the echo `error`: another rank's reason, or the ranks that did not come in time."""
        in_vain = is_late(str(error))
        if in_vain:
            self._store.set(f"late/{self.rank}", "")
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            if self._store.check(["failed"]):
                found = self._failure()
                # torchrun takes the earliest report, by whole seconds, for the cause; and others still read the store.
                time.sleep(_CONSEQUENCE_SECONDS)
                return found
            time.sleep(_POLL_SECONDS)
        silent = [rank for rank in range(self._size) if not self._has("late", rank)] if in_vain else []
        if silent:
            return late(dict.fromkeys(silent, ""), waited=self.rank)
        return error if isinstance(error, KumiError) else lost(self.rank, error)

    def _failure(self) -> CommunicationError:
        reason = json.loads(self._store.get("failed"))
        return CommunicationError(f"rank {self.rank} ends because rank {reason['rank']} failed: {reason['error']}")

    def _look_after(self, ranks: list[int]) -> None:
        """Raise CommunicationError when any rank has failed, or one of `ranks` does not beat any more."""
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
                    f"rank {rank} has died or hangs before training began: it has said nothing for "
                    f"{_SILENCE_SECONDS:.0f} s; see its output"
                )
        if absent and now - self._began > _ARRIVAL_SECONDS:
            raise CommunicationError(
                f"rank {', '.join(map(str, absent))} of {self._size} has not come within {_ARRIVAL_SECONDS:.0f} s; "
                f"check that all {self._size} ranks were started, and that they reach "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            )

    def _has(self, what: str, rank: int) -> bool:
        return bool(self._store.check([f"{what}/{rank}"]))

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # whoever served the store has gone; the main thread hears of that, too
            while True:
                self._store.set(f"beat/{self.rank}", str(count))
                count += 1
                if self._all_ready.wait(_BEAT_SECONDS):
                    return


@contextmanager
def meet(place: Standing) -> Iterator[Meeting]:
    """The meeting of all ranks that the launcher started, until the end of the block.

    An exception there is left for the other ranks, and for torchrun's report where that wants one; where it is only
    the consequence of another rank's failure, a CommunicationError with the cause takes its place. Raises
    CommunicationError when the store cannot be reached.
    """
    meeting = _open(place)
    try:
        yield meeting
        meeting.stay(_HEARING_SECONDS)
    except Exception as error:
        _end(meeting, error)
    finally:
        meeting.end()


def _open(place: Standing) -> Meeting:
    from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]

    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        store = _connect(host, int(port), place.world_size, serves)
    except (DistError, ValueError) as error:
        raise CommunicationError(
            f"rank {place.rank} of {place.world_size} cannot meet the others at {host}:{port} ({error}); check that "
            f"rank 0 runs there and that the address can be reached from here"
        ) from error
    # torchrun serves one store to all its attempts, and any store serves all meetings of an attempt.
    prefix = f"kumi/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_meetings)}"
    return Meeting(place, PrefixStore(prefix, store), serves=serves)


@cache
def _connect(host: str, port: int, size: int, serves: bool) -> Any:
    """The store, kept for the next meeting, which other ranks may have begun when rank 0 ends this one."""
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


def _end(meeting: Meeting, error: Exception) -> NoReturn:
    """Raise `error`, or its cause. The process will end without the tear-down, in which broken groups may hang."""
    import torch.distributed as dist

    cause = meeting.explained(error)
    _write_error_file(cause, error)
    with suppress(RuntimeError):
        meeting.stay(_FAILURE_HEARING_SECONDS)
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
    """Write the failure to where torchrun looks for it, in its format. What it shows is `py_callstack`."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    sentence = f"{type(cause).__name__}: {cause}"
    shown = sentence if isinstance(cause, KumiError) else "".join(traceback.format_exception(error))
    extra = {"py_callstack": shown, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(file, "w") as report:
        json.dump({"message": {"message": sentence, "extraInfo": extra}}, report)
