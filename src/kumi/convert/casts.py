"""Casting elements between dtypes, a buffer at a time and in the thread that asks, to the bits that PyTorch gives.

NumPy does it between bfloat16 and float32: torch takes longer to import than gigabytes take to cast.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kumi.storage.write import as_bytes

# Returns elements in their new dtype; they are valid until the next call.
Cast = Callable[[memoryview], memoryview]

# PyTorch casts up to this many elements in the calling thread, and more in several; conversion has threads of its own.
_SERIAL = 2**15


def make_cast(before: str, after: str, numel: int) -> Cast:
    """Return the cast from the dtype `before` to `after`, of at most `numel` elements a call."""
    if (before, after) == ("bfloat16", "float32"):
        return _widen(numel)
    if (before, after) == ("float32", "bfloat16"):
        return _round(numel)
    return _by_torch(before, after, numel)


def _widen(numel: int) -> Cast:
    """A bfloat16 is the upper half of a float32."""
    buffer = np.empty(numel, np.uint32)

    def cast(view: memoryview) -> memoryview:
        halves = np.frombuffer(view, np.uint16)
        words = buffer[: halves.size]
        words[:] = halves
        np.left_shift(words, 16, out=words)
        return words.data.cast("B")

    return cast


def _round(numel: int) -> Cast:
    """To the nearest, and to even bits in the middle: half a unit is added, or one bit less, and the rest cut off."""
    buffer, rounded = np.empty(numel, np.uint32), np.empty(numel, np.uint16)

    def cast(view: memoryview) -> memoryview:
        values = np.frombuffer(view, np.float32)
        with np.errstate(invalid="ignore"):
            if np.isnan(values.max()):  # which bits PyTorch gives these differs between CPUs
                return _by_torch("float32", "bfloat16", numel)(view)
        bits, words, halves = values.view(np.uint32), buffer[: values.size], rounded[: values.size]
        np.right_shift(bits, 16, out=words)
        np.bitwise_and(words, 1, out=words)
        np.add(words, 0x7FFF, out=words)
        np.add(words, bits, out=words)
        np.right_shift(words, 16, out=words)
        halves[:] = words
        return halves.data.cast("B")

    return cast


def _by_torch(before: str, after: str, numel: int) -> Cast:
    import torch

    buffer = torch.empty(numel, dtype=getattr(torch, after))

    def cast(view: memoryview) -> memoryview:
        values = torch.frombuffer(view, dtype=getattr(torch, before))
        for low in range(0, values.numel(), _SERIAL):
            part = values[low : low + _SERIAL]
            buffer[low : low + part.numel()].copy_(part)
        return as_bytes(buffer[: values.numel()])

    return cast
