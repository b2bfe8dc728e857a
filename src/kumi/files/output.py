"""Write below a folder of kumi's own without following links inside it.

A run folder may come from an untrusted source. The user names the folder, so the folder itself may be a link. Links
below it are never followed: a new file replaces a link at its path, and a link is refused where kumi appends to a file
or creates a folder.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

from kumi.errors import ModelError, RefusedError
from kumi.files.untrusted import TOKENIZER, explain, inside, open_stream

# Do not follow a link, and do not wait for a reader of a pipe.
_FLAGS = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_new(path: Path | str, mode: str = "w", buffering: int = -1) -> Any:
    """Open a new file `path` for writing (text is UTF-8), after removing an existing file or link of that name.

    If a link is removed, the file that it points to stays. Raise OSError when `path` is a folder.
    """
    remove_file(path)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    return os.fdopen(handle, mode, buffering=buffering, encoding=None if "b" in mode else "utf-8")


def open_append(path: Path | str, mode: str = "a") -> Any:
    """Open the file `path` for appending (text is UTF-8), or create it.

    Raise RefusedError when `path` is not a regular file.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _FLAGS, 0o666)
    except OSError:
        refuse_link(path)
        if os.path.lexists(path) and not os.path.isfile(path):
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_regular(path)
    return os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8")


def write_text(path: Path, text: str) -> None:
    """Write `text` to a new file `path`, as `open_new` opens it."""
    with open_new(path) as file:
        file.write(text)


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: a process that is killed meanwhile leaves the file as it was."""
    part = path.with_suffix(".part")
    write_text(part, text)
    os.replace(part, path)


def copy_into(target: Path, folder: Path, name: str) -> None:
    """Copy the untrusted file `name` of `folder` to the folder `target`. Raise ModelError when that fails."""
    limit = TOKENIZER.size
    try:
        with open_stream(inside(folder, name)) as source, open_new(target / name, "wb") as copy:
            if os.fstat(source.fileno()).st_size > limit:
                raise ValueError(f"it is larger than the limit of {limit} bytes")
            shutil.copyfileobj(source, copy)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / name}: cannot be copied to {target} ({explain(error)})") from None


def make_folder(path: Path) -> None:
    """Create the folder `path` unless it exists. Raise RefusedError when it is a link."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)


def remove_file(path: Path | str) -> None:
    """Remove the file or link `path` if it exists; the target of a link stays."""
    Path(path).unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove the folder `path` and its content if it exists; the target of a link stays."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def refuse_link(path: Path | str, remedy: str = "") -> None:
    """Raise RefusedError when `path` is a link; `remedy` is appended to the message."""
    if os.path.islink(path):
        raise RefusedError(
            f"{path}: is a link to {os.readlink(path)}; kumi does not write through links in a folder of its "
            f"own: put the file or folder itself there, or remove the link{remedy}"
        )


def _not_regular(path: Path | str) -> RefusedError:
    return RefusedError(f"{path}: is not a regular file, but kumi writes a file of this name; remove it")
