"""The processes of a session, which a test starts and must leave none of."""

from __future__ import annotations

import contextlib
import os


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
