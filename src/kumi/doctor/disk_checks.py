"""Checks of disks: the run folder is one writable folder that all nodes see, with room for the checkpoints."""

from __future__ import annotations

import secrets
import shutil
import time
from pathlib import Path

from kumi.doctor.finding import Reading
from kumi.doctor.here import Here
from kumi.errors import RefusedError
from kumi.files.output import make_folder, remove_tree, write_text
from kumi.files.untrusted import read_bytes
from kumi.remote.cache_folder import cache_limit

# Folder inside the run folder for the files of `shared_folder`.
DOCTOR_FOLDER = ".doctor"
# A network file system may need this long to show a new file to other nodes.
_VISIBLE_SECONDS = 6.0
_POLL_SECONDS = 0.1


def free_disk(here: Here) -> Reading:
    """Return the free bytes on the disk of the run folder, and those that the run's checkpoints need.

    If train.out is a URL, the local run folder is in kumi's cache, so the limit of the cache counts, too.
    """
    if here.run is None:
        return Reading(absent="no run file is given")
    if here.run.problem:
        return Reading(absent="the run file cannot be used")
    free = shutil.disk_usage(_existing(here.run.out)).free
    return Reading(min(free, cache_limit()) if here.run.url else free, need=here.run.checkpoint_space)


def _existing(path: Path) -> Path:
    """Return `path` if it exists, else the nearest folder above it that does."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def shared_folder(here: Here) -> Reading:
    """Write a file in the run folder on each node, and look there for the files of the other nodes.

    Node 0 writes first; the others look for its file, write one each, and node 0 looks for all of them.
    """
    if here.run is None:
        return Reading(absent="no run file is given")
    out, meeting, node = here.run.out, here.meeting, here.meeting.seat.node
    existing = _existing(out)
    folder = out / DOCTOR_FOLDER
    mark = secrets.token_hex(8) if node == 0 else ""
    problem = _write(folder / "0", mark) if node == 0 else ""
    marks = meeting.exchange("the file of node 0", {"mark": mark, "problem": problem}, seconds=10.0)
    announced = marks.get(0, {})
    began = time.monotonic()
    if node and not announced.get("problem"):
        if not _appears(folder / "0", str(announced.get("mark"))):
            problem = f"{out} is not the folder of node 0: its file does not appear here within {_VISIBLE_SECONDS:g} s"
        else:
            problem = _write(folder / str(node), str(announced.get("mark")))
    problems = meeting.exchange("the files of all nodes", problem, seconds=_VISIBLE_SECONDS + 10.0)
    if node == 0 and not problem:
        late = [other for other in problems if not problems[other] and not _appears(folder / str(other), mark)]
        names = ", ".join(f"{meeting.seat.noun} {other}" for other in late)
        problem = f"the files of {names} in {out} do not appear here" if late else ""
    seconds = time.monotonic() - began
    meeting.exchange("all files were read", None, seconds=_VISIBLE_SECONDS * len(problems) + 10.0)
    if node == 0:
        _clean(out, folder, existing)
    if problem:
        return Reading(problems=(problem,))
    if node:
        return Reading(absent="node 0 reports")
    return Reading("writable" if len(problems) == 1 else f"writable, and the same: files visible after {seconds:.2f} s")


def _write(file: Path, text: str) -> str:
    """Write `text` to `file`, and create the run folder if it is missing. Return why that failed, or ""."""
    try:
        file.parent.parent.mkdir(parents=True, exist_ok=True)
        make_folder(file.parent)
        write_text(file, text)
    except OSError as error:
        return f"{file.parent.parent} is not writable ({error.strerror or error})"
    return ""


def _appears(file: Path, text: str) -> bool:
    """Wait until `file` contains `text`; return False after `_VISIBLE_SECONDS`."""
    until = time.monotonic() + _VISIBLE_SECONDS
    while time.monotonic() < until:
        try:
            list(file.parent.iterdir())  # makes NFS look at the server
            if read_bytes(file.parent, file.name, RefusedError) == text.encode():
                return True
        except (OSError, RefusedError):
            pass
        time.sleep(_POLL_SECONDS)
    return False


def _clean(out: Path, folder: Path, existing: Path) -> None:
    """Remove the files of this check, and the folders from `out` upwards that this check created below `existing`."""
    try:
        remove_tree(folder)
        out = out.absolute()
        while out != existing:
            out.rmdir()
            out = out.parent
    except OSError:
        return  # the folder is not writable, which the finding says, or another program writes there
