"""Old import paths of documented modules: they go on working, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def moved(old: str, new: str, renamed: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that warns that `old` moved, and reads the name in the module `new`.

    `renamed`: names that changed with the move, old -> new.
    """

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        current = (renamed or {}).get(name, name)
        warnings.warn(f"{old} moved to {new}; import {current} from there", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), current)

    return __getattr__
