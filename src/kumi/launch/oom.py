"""How many processes the kernel has killed because memory ran out, as the control group of this process counts them."""

from __future__ import annotations

from pathlib import Path

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_kills(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Processes of this control group killed so far; None where the system does not count them.

    Reads `oom_kill` of memory.events (version 2 of control groups) or memory.oom_control (version 1).
    """
    for file in _files(groups, mount):
        try:
            lines = [line.split() for line in file.read_text().splitlines()]
        except OSError:
            continue
        for name, *values in lines:
            if name == "oom_kill" and len(values) == 1 and values[0].isdecimal():
                return int(values[0])
    return None


def _files(groups: Path, mount: Path) -> list[Path]:
    """Where the counter may be. In a container the group's own path may be that of the host, and the mount its root."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if "memory" in controllers.split(","):
            found += [mount / "memory" / inner / "memory.oom_control", mount / "memory" / "memory.oom_control"]
        elif controllers == "":
            found += [mount / inner / "memory.events", mount / "memory.events"]
    return found
