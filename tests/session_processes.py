"""Processes that a test starts and must leave none of."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def living(session):
    """The processes of a session that have not ended."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                state, _, _, sid = file.read().rpartition(")")[2].split()[:4]
                if int(sid) == session and state != "Z":
                    pids.append(int(name))
    return pids


def runs_with(word):
    """Return True if a process of this machine has `word` in its command line."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            if word.encode() in file.read_bytes():
                return True
    return False
