"""Count the processes that the kernel killed for lack of memory, from the control group (cgroup) of this process."""

from __future__ import annotations

from pathlib import Path

# The file that lists the cgroups of this process, and the folder where cgroups are mounted.
_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def oom_kills(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Return the number of out-of-memory kills in this cgroup so far; None if the system does not count them.

    Read `oom_kill` from memory.events (cgroup v2) or memory.oom_control (cgroup v1).
    """
    for file in _files(groups, mount):
        try:
            lines = [line.split() for line in file.read_text().splitlines()]
        except OSError:  # the other cgroup version, or no such group
            continue
        for name, *values in lines:
            if name == "oom_kill" and len(values) == 1 and values[0].isdecimal():
                return int(values[0])
    return None


def _files(groups: Path, mount: Path) -> list[Path]:
    """Return the files that may have the counter.

    In a container, the cgroup's path may be the host's, and the mount point the root of the container's cgroup.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux, or /proc is hidden
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
