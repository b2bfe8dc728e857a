"""Control groups of Linux that bound the memory and the processes of a program, in version 2 or version 1."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

# The list of this process's groups, and the folder in which Linux mounts all groups.
_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# The name of every group begins with this and the id of the run's process.
PREFIX = "kumi-reward-"
# Seconds for the processes of a group to disappear after they were killed.
_END_S = 10.0
# Numbers the groups of this process.
_numbers = count()


@dataclass(frozen=True)
class GroupFolders:
    """The groups below which this process can make groups: in version 2 one group for all limits, in version 1 two."""

    memory: Path
    pids: Path

    @property
    def version(self) -> int:
        return 2 if self.memory == self.pids else 1


def writable_groups(groups: Path = _GROUPS, mount: Path = _MOUNT) -> GroupFolders | None:
    """Return groups below which this process can make groups with limits, and move its children there; or None.

    They are this process's own groups, or groups above these: in version 2, a group with processes in it, such as this
    process's own often is, cannot have groups with limits below it.
    """
    paths = _own_paths(groups)
    if "" in paths and (mount / "cgroup.controllers").exists():
        candidates = [GroupFolders(folder, folder) for folder in _upwards(mount, paths[""])]
    elif {"memory", "pids"} <= paths.keys():
        memory, pids = (_upwards(mount / kind, paths[kind]) for kind in ("memory", "pids"))
        candidates = [GroupFolders(first, second) for first, second in zip(memory, pids, strict=False)]
        # The two lists end at the roots, and may have different lengths.
        candidates.append(GroupFolders(mount / "memory", mount / "pids"))
    else:
        return None
    return next((folders for folders in candidates if _works(folders)), None)


def _own_paths(groups: Path) -> dict[str, str]:
    """Return the path of this process's group for each controller of version 1, and for "", which is version 2."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:  # not Linux, or /proc is hidden
        return {}
    return {name: path for _, controllers, path in lines for name in controllers.split(",")}


def _upwards(root: Path, path: str) -> list[Path]:
    """Return the group `path` below the mount point `root` and all groups above it, as far as they exist.

    In a container, `path` may be the path on the host, and `root` show the container's own group.
    """
    group = root / path.lstrip("/")
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(root) and folder.is_dir()]


def _works(folders: GroupFolders) -> bool:
    """Return True if a group below `folders` can be made, limited and entered by a child."""
    try:
        with open_group(folders, f"{PREFIX}{os.getpid()}", memory=2**26, processes=8) as group:
            sleeper = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
            try:
                for file in group.entries:
                    file.write_text(str(sleeper.pid))
            finally:
                sleeper.kill()
                sleeper.wait()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class ControlGroup:
    """A group for one program. `folders`: the group itself, or its two halves in version 1."""

    folders: Sequence[Path]

    @property
    def entries(self) -> list[Path]:
        """The files to which a process writes 0 to enter the group."""
        return [folder / "cgroup.procs" for folder in self.folders]

    def processes(self) -> set[int]:
        """Return the processes in the group."""
        return {int(word) for file in self.entries for word in file.read_text().split()}

    def remove(self) -> None:
        """Kill the processes of the group, and remove it. Raise TimeoutError if a process does not end."""
        deadline = time.monotonic() + _END_S
        while True:
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                for folder in self.folders:
                    with suppress(FileNotFoundError):
                        folder.rmdir()
                return
            except OSError:  # busy: a process is still ending
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.folders[0]}: processes of a program do not end") from None
            time.sleep(0.005)


@contextmanager
def open_group(folders: GroupFolders, prefix: str, memory: int, processes: int) -> Iterator[ControlGroup]:
    """Make a group with limits of `memory` bytes and `processes`; at the end, kill its processes and remove it.

    Raise OSError if the group cannot be made.
    """
    name = f"{prefix}-{os.getpid()}-{next(_numbers)}"
    parts = [folders.memory / name] if folders.version == 2 else [folders.memory / name, folders.pids / name]
    made: list[Path] = []
    try:
        for part in parts:
            part.mkdir()
            made.append(part)
        _limit(parts[0], parts[-1], folders.version, memory, processes)
    except OSError:
        for part in made:
            part.rmdir()
        raise
    group = ControlGroup(parts)
    try:
        yield group
    finally:
        group.remove()


def _limit(memory_group: Path, pids_group: Path, version: int, memory: int, processes: int) -> None:
    """Write the limits. The limit of memory also holds for memory and swap together."""
    if version == 2:
        (memory_group / "memory.max").write_text(str(memory))
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            if (memory_group / name).exists():
                (memory_group / name).write_text(value)
    else:
        (memory_group / "memory.limit_in_bytes").write_text(str(memory))
        with_swap = memory_group / "memory.memsw.limit_in_bytes"
        if with_swap.exists():
            with_swap.write_text(str(memory))
    (pids_group / "pids.max").write_text(str(processes))


def remove_left_groups(folders: GroupFolders) -> None:
    """Remove the groups below `folders` that this process, or one that has ended, left behind; they have no processes.

    A worker that was killed leaves its group behind.
    """
    for folder in {folders.memory, folders.pids}:
        for group in folder.glob(f"{PREFIX}*"):
            owner = group.name.removeprefix(PREFIX).split("-")[0]
            if owner == str(os.getpid()) or not Path("/proc", owner).exists():
                with suppress(OSError):
                    group.rmdir()
