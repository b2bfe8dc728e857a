"""Limits of the time and memory that a chat template, code of unknown origin, may use.

Two timers of CPU time run while a template does. At the limit a signal raises an exception between two instructions of
the interpreter. A second later another signal ends the process, because a call of compiled code, such as a search in a
long text, handles no signals. The kernel refuses memory beyond the limit, so that an allocation fails here and not in
another program. All of it is off while no template runs: tokenizers and arrays are not limited.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from kumi.data.chat.masked import RowRefused

Result = TypeVar("Result")

TIME, MEMORY, OUTPUT, ERROR = "template-time", "template-memory", "template-output", "template-error"
# Seconds of CPU time after the limit until the process ends.
GRACE_S = 1.0
# Seconds of CPU time between signals of the time limit.
_REPEAT_S = 0.2
# Only a template that runs longer than this, in seconds of CPU time, can link so many objects that freeing them
# overflows a stack of 8 MiB.
_LONG_S = 0.02
_STATM = "/proc/self/statm"

# Whether the signal of the time limit raises; one template at a time runs in a process.
_armed = False


class _ExpiredError(BaseException):
    """The time is over. No `except Exception` of a library catches it."""


def _expire(number: int, frame: FrameType | None) -> None:
    """Handle the signal of the time limit."""
    if _armed:
        raise _ExpiredError


class Limits:
    """Limits of the time and memory of each call of `run`, or of all calls between `start` and `end`: a conversation.

    timeout_s: seconds of CPU time; not limited in a thread, where signals cannot raise.
    memory_gib: GiB of address space beyond that in use when the conversation starts; not limited without /proc.
    """

    def __init__(self, timeout_s: float, memory_gib: float) -> None:
        self.timeout_s, self.memory_gib = timeout_s, memory_gib
        self._signals = threading.current_thread() is threading.main_thread()
        self._statm = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC) if os.path.exists(_STATM) else -1
        self.start()
        self.end()

    def __del__(self) -> None:
        if self._statm >= 0:
            os.close(self._statm)

    def start(self) -> None:
        """Begin a conversation: the time is that of all calls of `run` until `end`."""
        self._in_conversation, self._left = True, self.timeout_s
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        self._bound = self._before
        if self._statm >= 0:
            pages = int(os.pread(self._statm, 64, 0).split()[0])
            size = pages * os.sysconf("SC_PAGE_SIZE") + int(self.memory_gib * 2**30)
            finite = [value for value in self._before if value != resource.RLIM_INFINITY]
            self._bound = (min([size, *finite]), self._before[1])

    def end(self) -> None:
        """End the conversation: each later call of `run` has all of the time.

        Objects of a template that worked long are freed here: it may have linked so many, in a cycle, that freeing them
        ends the process, which must not happen in another row.
        """
        self._in_conversation = False
        if self.timeout_s - self._left > _LONG_S:
            gc.collect()

    def run(self, function: Callable[[], Result]) -> Result:
        """Return `function()`. Raise RowRefused if it needs more than the time that is left, or more memory."""
        if not self._in_conversation:
            self.start()
            self._in_conversation = False
        try:
            try:
                self._arm()
                return function()
            finally:
                self._disarm()
        except _ExpiredError:
            self._disarm()
            kind, reason = TIME, timeout_reason(self.timeout_s)
        except MemoryError:
            kind, reason = MEMORY, memory_reason(self.memory_gib)
        # Raised here, not above: the exception above refers to the template's frames, and so to all of their memory.
        raise RowRefused(kind, reason)

    def _arm(self) -> None:
        """Switch the limits on, with the time that is left."""
        global _armed
        resource.setrlimit(resource.RLIMIT_AS, self._bound)
        if self._signals:
            signal.signal(signal.SIGPROF, _expire)
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
            # A timer of 0 seconds never expires.
            left = max(self._left, 1e-3)
            signal.setitimer(signal.ITIMER_VIRTUAL, left + GRACE_S)
            _armed = True
            # It repeats, because Python drops an exception that is raised in a finaliser.
            signal.setitimer(signal.ITIMER_PROF, left, _REPEAT_S)

    def _disarm(self) -> None:
        """Switch the limits off, and note the time that is left."""
        global _armed
        _armed = False
        if self._signals:
            self._left = min(self._left, signal.setitimer(signal.ITIMER_PROF, 0)[0])
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self._before)


def timeout_reason(timeout_s: float) -> str:
    """Return the reason of a row refused for its time."""
    return f"the chat template takes more than {timeout_s:g} s (data.chat.timeout_s)"


def memory_reason(memory_gib: float) -> str:
    """Return the reason of a row refused for its memory."""
    return f"the chat template needs more than {memory_gib:g} GiB (data.chat.memory_gib)"
