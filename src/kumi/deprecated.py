"""Old import paths of documented modules: they go on working, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that warns that `old` moved, and reads the name in the module `new`."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old} moved to {new}; import {name} from there", DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)

    return __getattr__
