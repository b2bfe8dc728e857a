"""Modules whose computation others may surround: recomputation, activations kept on the host, what is not compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn


class Surrounded(nn.Module):
    """A module that computes by `compute`, inside what is in `around`.

    `around` has functions, the innermost first, each of which is called with what it surrounds and the arguments of
    the module, and returns the module's result. `lambda inner, *args: inner(*args)` changes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.around: list[Callable[..., Any]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `compute` returns, called inside all of `around`."""
        run: Callable[..., Any] = self.compute
        for outer in self.around:
            run = partial(outer, run)
        return run(*args, **kwargs)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's result."""
        raise NotImplementedError
