"""Paths in messages: a relative path is worth little without the folder it starts from."""

from __future__ import annotations

import os
from pathlib import Path


def looked_for(path: str | Path) -> str:
    """Return `path` as text for an error; a relative one with the folder from which it was looked for."""
    text = os.fspath(path)
    expanded = Path(os.path.expanduser(text))
    return text if expanded.is_absolute() else f"{text} (looked for from {_working_folder()})"


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a working directory that was deleted"
