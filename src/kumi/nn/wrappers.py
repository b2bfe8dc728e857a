"""Wrappers around a module's computation: recomputation, offloading of activations, exclusion from compilation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# A wrapper is called with the function that it wraps and the module's arguments, and returns the module's result.
# `lambda inner, *args: inner(*args)` changes nothing.
Wrapper = Callable[..., Any]


def wrap(wrappers: list[Wrapper], compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute` wrapped in each of `wrappers`, the first one innermost."""
    for wrapper in wrappers:
        compute = partial(wrapper, compute)
    return compute
