"""Modules whose computation others may surround: recomputation, activations kept on the host, what is not compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# Called with what it surrounds and the arguments of the module; returns the module's result.
# `lambda inner, *args: inner(*args)` changes nothing.
Around = Callable[..., Any]


def inside(around: list[Around], compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that calls `compute` inside the wrappers `around`, the first of them innermost."""
    for outer in around:
        compute = partial(outer, compute)
    return compute
