"""Paths in messages: a relative path is worth little without the folder it starts from."""

from __future__ import annotations

import os
from pathlib import Path


def looked_for(path: str | Path) -> str:
    """Return `path` as text for an error; a relative one with the folder from which it was looked for."""
    return f"{os.fspath(path)}{from_where(path)}"


def from_where(path: str | Path) -> str:
    """Return from which folder `path` was looked for, in brackets; empty for an absolute path."""
    absolute = Path(os.path.expanduser(path)).is_absolute()
    return "" if absolute else f" (looked for from {_working_folder()})"


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a working directory that was deleted"
