"""List, rotate and clean the checkpoint folders of a run.

A folder named `step_000200` is a complete checkpoint. It is written as `step_000200.tmp` and renamed once all its files
are synced to disk, so the name alone marks it as complete. A folder whose name ends in `.tmp` is in progress or left
over from a process that died.
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
from kumi.files.untrusted import read_object
from kumi.units import format_bytes

# Folder of the checkpoints inside a run folder.
CHECKPOINTS = "checkpoints"
# File beside the checkpoints that names the step of the best one.
BEST = "best.json"
_COMPLETE = re.compile(r"step_(\d{6,})")
_LEFTOVER = re.compile(r"step_(\d{6,})(\.deleted)?\.tmp")


def checkpoint_root(out: Path) -> Path:
    """Return the folder of the checkpoints of the run in `out`."""
    return out / CHECKPOINTS


def step_folder(root: Path | str, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return Path(root) / f"step_{step:06d}"


def temporary_folder(folder: Path | str) -> Path:
    """Return the folder in which the checkpoint `folder` is written before its commit."""
    folder = Path(folder)
    return folder.with_name(folder.name + ".tmp")


def step_of(folder: Path | str) -> int:
    """Return the step in a checkpoint folder's name."""
    match = _COMPLETE.fullmatch(Path(folder).name)
    assert match is not None, f"{folder} is not the name of a checkpoint folder"
    return int(match[1])


def list_complete(root: Path | str) -> list[Path]:
    """Return the complete checkpoints under `root`, oldest first; an empty list when `root` is not a folder.

    Raise RefusedError when one of them is a link.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    complete = [path for path in root.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    for path in complete:
        refuse_link(path)  # rotation would delete files outside of `root`
    return sorted(complete, key=step_of)


def latest(root: Path | str) -> Path | None:
    """Return the newest complete checkpoint under `root`, or None."""
    complete = list_complete(root)
    return complete[-1] if complete else None


def best_step(root: Path | str) -> int | None:
    """Return the step in best.json under `root`, or None if there is no such file; the step may have no checkpoint.

    Raise RefusedError if the file is damaged.
    """
    root = Path(root)
    if not (root / BEST).is_file():
        return None
    step = read_object(root, BEST, RefusedError).get("step")
    if type(step) is not int or step < 0:
        raise RefusedError(
            f"{root / BEST}: names step {step!r}, which is not a step; delete the file, or write a checkpoint's step"
        )
    return step


def rotate(root: Path | str, keep: int, protect: Collection[Path | str] = ()) -> list[Path]:
    """Remove all complete checkpoints except the newest `keep` and those in `protect`; return the removed folders.

    Each folder is renamed before its files are deleted, so a kill never leaves half a checkpoint under its name.
    """
    assert keep >= 1, f"keep={keep}: rotation keeps at least one checkpoint"
    protected = {Path(path).name for path in protect}
    outdated = [folder for folder in list_complete(root)[:-keep] if folder.name not in protected]
    for folder in outdated:
        renamed = folder.with_name(folder.name + ".deleted.tmp")
        remove_tree(renamed)
        folder.rename(renamed)
        shutil.rmtree(renamed)
    return outdated


def clean(root: Path | str, before: int) -> list[Path]:
    """Remove the leftovers of dead processes under `root`, for steps below `before`; return the removed folders.

    Leftovers of later steps stay: another rank may be writing them already, and a save of such a step overwrites what a
    dead process left.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in root.iterdir())
    leftovers = [path for path, match in matches if match is not None and int(match[1]) < before]
    for path in leftovers:
        remove_tree(path)
    return leftovers


def check_free_space(root: Path | str, bytes_needed: int, what: str = "a checkpoint") -> None:
    """Raise RefusedError unless the disk of `root` has `bytes_needed` free bytes; the error calls them `what`."""
    existing = Path(root).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < bytes_needed:
        raise RefusedError(
            f"{root}: not enough disk for {what}: it needs {format_bytes(bytes_needed)} ({bytes_needed} bytes) "
            f"and {format_bytes(free)} ({free} bytes) are free; free some, keep less, or write elsewhere"
        )


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of `folder` to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems order renames themselves and reject this call
            raise
    finally:
        os.close(handle)
