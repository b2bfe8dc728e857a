"""How many processes the kernel has killed because memory ran out, as the control group of this process counts them."""

from __future__ import annotations

from pathlib import Path

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_kills(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Return how many processes of this control group were killed so far, None where the system does not count them.

    Reads `oom_kill` of memory.events (version 2 of control groups) or memory.oom_control (version 1).
    """
    for file in _files(groups, mount):
        try:
            lines = [line.split() for line in file.read_text().splitlines()]
        except OSError:  # the system has the other version, or no such group
            continue
        for name, *values in lines:
            if name == "oom_kill" and len(values) == 1 and values[0].isdecimal():
                return int(values[0])
    return None


def _files(groups: Path, mount: Path) -> list[Path]:
    """Return where the counter may be. In a container, the group's path may be the host's, and the mount its root."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # no Linux, or one that hides /proc
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if "memory" in controllers.split(","):
            files += [mount / "memory" / inner / "memory.oom_control", mount / "memory" / "memory.oom_control"]
        elif controllers == "":
            files += [mount / inner / "memory.events", mount / "memory.events"]
    return files
