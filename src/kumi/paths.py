"""Format paths for messages: a relative path is shown with the working directory."""

from __future__ import annotations

import os
from pathlib import Path


def looked_for(path: str | Path) -> str:
    """Return `path` as text for an error; a relative path is followed by the working directory."""
    return f"{os.fspath(path)}{from_where(path)}"


def from_where(path: str | Path) -> str:
    """Return the working directory in parentheses, with a leading space, or "" when `path` is absolute."""
    absolute = Path(os.path.expanduser(path)).is_absolute()
    return "" if absolute else f" (looked for from {_working_folder()})"


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a working directory that was deleted"
