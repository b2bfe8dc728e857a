"""Write below a folder of kumi's own without following links that lie in it.

A run folder may have come from elsewhere, too. The folder itself may be a link, for the user names it; nothing below it
is followed: a link in the place of a file is replaced, or refused where the file would be kept.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import Any

from kumi.errors import ModelError, RefusedError
from kumi.files.untrusted import TOKENIZER, explain, inside, open_stream

_FLAGS = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def open_new(path: Path | str, mode: str = "w", buffering: int = -1) -> Any:
    """Open a new file `path` for writing, text in UTF-8; whatever had the name before loses it and keeps its content.

    Raises OSError when a folder has the name.
    """
    remove_file(path)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    return os.fdopen(handle, mode, buffering=buffering, encoding=None if "b" in mode else "utf-8")


def open_kept(path: Path | str, mode: str = "a") -> Any:
    """Open the file `path` for appending text, or make it; RefusedError when the name is not that of a regular file."""
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
    return os.fdopen(handle, mode, encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a new file `path`; whatever had the name before loses it and keeps its content."""
    with open_new(path) as file:
        file.write(text)


def copy_into(target: Path, folder: Path, name: str) -> None:
    """Copy the file `name` of `folder`, which others made, into the folder `target`; ModelError when it is none."""
    limit = TOKENIZER.size
    try:
        with open_stream(inside(folder, name)) as source, open_new(target / name, "wb") as copy:
            if os.fstat(source.fileno()).st_size > limit:
                raise ValueError(f"it has more than the {limit} bytes that such a file may have")
            shutil.copyfileobj(source, copy)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / name}: cannot be copied to {target} ({explain(error)})") from None


def make_folder(path: Path) -> None:
    """Make the folder `path`, or leave it as it is; RefusedError when it is a link."""
    refuse_link(path)
    path.mkdir(parents=True, exist_ok=True)


def remove_file(path: Path | str) -> None:
    """Take the name `path` away, if it is there; a link goes, its target stays."""
    Path(path).unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Remove the folder `path` with all in it, if it is there; of a link only the link, never what it leads to."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def refuse_link(path: Path | str, remedy: str = "") -> None:
    """Raise RefusedError when `path` is a link; `remedy` says what else can be done about it."""
    if os.path.islink(path):
        raise RefusedError(
            f"{path}: is a link to {os.readlink(path)}; kumi writes through no link in a folder of its "
            f"own: put the file or folder itself there, or remove the link{remedy}"
        )


def _not_regular(path: Path | str) -> RefusedError:
    return RefusedError(f"{path}: is no regular file, but kumi writes one of this name; remove it")
