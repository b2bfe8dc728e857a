"""Which checkpoints a run has: folders `step_000200` under one root, complete exactly when they bear that name.

A checkpoint is written in `step_000200.tmp` and renamed when everything in it is on the disk, so no other sign of
completeness is needed; whatever ends in `.tmp` is a leftover of a process that died.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from kumi.errors import RefusedError
from kumi.files.output import refuse_link, remove_tree
from kumi.units import format_bytes

_COMPLETE = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(r"step_(\d{6,})(\.deleted)?\.tmp")


def step_folder(root: Path | str, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return Path(root) / f"step_{step:06d}"


def temporary_folder(folder: Path | str) -> Path:
    """The folder in which `folder` is put together before it gets its name."""
    folder = Path(folder)
    return folder.with_name(folder.name + ".tmp")


def step_of(folder: Path | str) -> int:
    """The step in a checkpoint folder's name."""
    match = _COMPLETE.fullmatch(Path(folder).name)
    assert match is not None, f"{folder} is not the name of a checkpoint folder"
    return int(match[1])


def list_complete(root: Path | str) -> list[Path]:
    """The complete checkpoints under `root`, oldest first; none when there is no such folder.

    Raises RefusedError when one of them is a link.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    for path in found:
        refuse_link(path)  # rotation would take it for one of its own
    return sorted(found, key=step_of)


def latest(root: Path | str) -> Path | None:
    """The newest complete checkpoint under `root`."""
    complete = list_complete(root)
    return complete[-1] if complete else None


def rotate(root: Path | str, keep: int, protect: Collection[Path | str] = ()) -> list[Path]:
    """The folders removed so that the newest `keep` complete checkpoints and those in `protect` remain.

    A folder loses its name before its files, so a kill in between leaves no half of a checkpoint.
    """
    assert keep >= 1, "at least one checkpoint has to stay"
    spared = {Path(path).name for path in protect}
    doomed = [folder for folder in list_complete(root)[:-keep] if folder.name not in spared]
    for folder in doomed:
        nameless = folder.with_name(folder.name + ".deleted.tmp")
        remove_tree(nameless)
        folder.rename(nameless)
        shutil.rmtree(nameless)
    return doomed


def clean(root: Path | str, before: int) -> list[Path]:
    """The leftovers of dead processes that were removed under `root`: those of steps `before` this one.

    A later one may belong to a rank that is ahead of us; if it does not, the save of that step takes it over.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    found = ((path, _LEFTOVER.fullmatch(path.name)) for path in root.iterdir())
    leftovers = [path for path, match in found if match is not None and int(match[1]) < before]
    for path in leftovers:
        remove_tree(path)
    return leftovers


def free_space_check(root: Path | str, bytes_needed: int, what: str = "a checkpoint") -> None:
    """Nothing, or RefusedError when the disk that holds `root` has no room for `what`, `bytes_needed` bytes."""
    place = Path(root).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < bytes_needed:
        raise RefusedError(
            f"{root}: not enough disk for {what}: it needs {format_bytes(bytes_needed)} ({bytes_needed} bytes) "
            f"and {format_bytes(free)} ({free} bytes) are free; free some, keep less, or write elsewhere"
        )


def sync_folder(folder: Path) -> None:
    """Nothing, when the names in `folder` are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems order renames themselves and refuse this call
            raise
    finally:
        os.close(handle)
