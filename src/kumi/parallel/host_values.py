"""Numbers that the host reads from the device in a recomputed layer, read once for its forward and its replay.

The replay is the second run of the layer's forward, during the backward pass. Where the host needs a number that the
device computes, such as the size of a message to experts, it waits for the device. The replay computes the same numbers
again, so it takes those that the forward has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

# Returns the numbers in a tensor as a list.
_Read = Callable[[Tensor], Any]


def read_once(values: Tensor) -> Any:
    """Return `values` as a list of numbers; in the replay of a layer, return those of its forward."""
    return _to_host(values) if torch.compiler.is_compiling() else _reads[-1](values)


class HostValues:
    """The lists that `read_once` returned in the forward of one layer, in the order of the calls."""

    def __init__(self) -> None:
        self._values: list[Any] = []

    def recorded(self) -> AbstractContextManager[None]:
        """Return a context for the forward."""
        return _reading(self._record)

    def repeated(self) -> AbstractContextManager[None]:
        """Return a context for a replay."""
        values = iter(self._values)
        return _reading(lambda _: next(values))

    def _record(self, values: Tensor) -> Any:
        self._values.append(_to_host(values))
        return self._values[-1]


def _to_host(values: Tensor) -> Any:
    return values.tolist()


# A stack of the functions by which `read_once` reads: it calls the last, that of the layer which runs now. The stack is
# global, not thread-local: a rank runs one layer at a time, but the replay may run in another thread than the forward.
_reads: list[_Read] = [_to_host]


@contextmanager
def _reading(read: _Read) -> Iterator[None]:
    """A context in which `read_once` reads by `read`."""
    _reads.append(read)
    try:
        yield
    finally:
        _reads.pop()
