"""A Python program to run in a sandbox: its limits, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program with all processes that it starts.

    memory: bytes, with those of the files that it writes.
    processes: processes and threads.
    files: bytes of files that it writes.
    output: bytes of its standard output, and of its standard error.
    """

    memory: int
    processes: int
    files: int
    output: int


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    code: its exit code, 128 + n if signal n ended it.
    output: its standard output, cut at the limit.
    errors: its standard error, cut at the limit.
    ended: the limit at which it was ended; "" if it ended by itself, or at a limit of the system.
    """

    code: int
    output: bytes
    errors: bytes
    ended: Literal["", "time", "output"] = ""


# (program, standard input, seconds) -> its outcome. The program is Python source.
RunProgram = Callable[[str, bytes, float], Outcome]
