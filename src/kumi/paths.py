"""Format paths for messages: a relative path is shown with the working directory."""

from __future__ import annotations

import os
from pathlib import Path


def shown_path(path: str | Path) -> str:
    """Return `path` as text for an error, followed by `cwd_note(path)`."""
    return f"{os.fspath(path)}{cwd_note(path)}"


def cwd_note(path: str | Path) -> str:
    """Return " (looked for from FOLDER)" with the working directory for a relative `path`, "" for an absolute one."""
    absolute = Path(os.path.expanduser(path)).is_absolute()
    return "" if absolute else f" (looked for from {_working_folder()})"


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a working directory that was deleted"
