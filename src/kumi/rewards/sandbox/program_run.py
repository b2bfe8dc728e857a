"""A Python program to run in a sandbox: its limits, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program with all processes that it starts.

    memory: bytes of memory, with those of the files that it writes.
    processes: number of processes and threads.
    files: bytes of files that it writes.
    output: bytes of its standard output, and as many of its standard error.
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
    ended: the limit at which the sandbox ended it; "" if it ended by itself, or the kernel ended it at a limit.
    """

    code: int
    output: bytes
    errors: bytes
    ended: Literal["", "time", "output"] = ""


# (program, standard input, seconds) -> its outcome. The program is Python source.
RunProgram = Callable[[str, bytes, float], Outcome]
