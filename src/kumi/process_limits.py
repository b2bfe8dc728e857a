"""The processor cores and the memory of the machine that this process may use, and how its threads wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# The machine's memory, the control groups of this process, and the folder where control groups are mounted.
_MEMINFO, _GROUPS, _MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

# For version 2 and version 1 of control groups: the file with a group's limit of memory, the file with its memory in
# use (both in bytes), and the key in memory.stat of cached files, whose memory is freed when memory runs short.
_FILES = ("memory.max", "memory.current", "inactive_file")
_OLD_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


# Variables with which threads of OpenMP sleep while they wait for work. OpenMP reads them when torch is imported.
SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}


def let_threads_sleep() -> None:
    """Set `SLEEPING_THREADS` where the user has set no policy. Call it before torch is imported.

    Generating a token, or scoring a short text, takes hundreds of small operators. Threads that spin at the end of
    each, on cores that other programs use, make it more than ten times as slow.
    """
    for name, value in SLEEPING_THREADS.items():
        os.environ.setdefault(name, value)


def usable_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(meminfo: Path = _MEMINFO, groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Return the bytes of memory that this process can still get; None where the system does not tell.

    This is the machine's available memory, or less where a control group, such as a container or a login session,
    limits its processes.
    """
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
    except OSError:  # not Linux, or /proc is hidden
        return None
    available = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)
    return None if available is None else min([available, *_left_in_groups(groups, mount)])


def _left_in_groups(groups: Path, mount: Path) -> Iterator[int]:
    """Yield the bytes that each control group with a limit, from the process's own to the root, has left.

    In a container, the group's path may be the host's, and the mount point the root of the container's group.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        old = "memory" in controllers.split(",")
        if not old and controllers:
            continue
        root = mount / "memory" if old else mount
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _left(folder, *(_OLD_FILES if old else _FILES))
            if folder == root:
                break


def _left(group: Path, limit_file: str, use_file: str, reclaimable: str) -> Iterator[int]:
    """Yield the bytes that the control group in the folder `group` has left, if it has a limit; see `_FILES`."""
    try:
        limit, use = (group / limit_file).read_text().strip(), int((group / use_file).read_text())
        lines = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except OSError:  # no such group here, or the root, which has no limit
        return
    if limit.isdecimal():  # else "max"
        yield max(0, int(limit) - use + sum(int(words[1]) for words in lines if words[0] == reclaimable))
