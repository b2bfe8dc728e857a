"""Cast elements between dtypes, one buffer at a time in the calling thread, bit for bit as PyTorch does.

NumPy casts between bfloat16 and float32, because to import torch takes longer than to cast gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kumi.storage.write import as_bytes

# Maps the bytes of elements to their bytes in the new dtype. The result is valid until the next call.
Cast = Callable[[memoryview], memoryview]

# Elements per call to PyTorch, which would use several threads for more; conversion has threads of its own.
_SERIAL = 2**15


def make_cast(before: str, after: str, numel: int) -> Cast:
    """Return a function that casts up to `numel` elements per call from the dtype `before` to `after`."""
    if (before, after) == ("bfloat16", "float32"):
        return _bf16_to_fp32(numel)
    if (before, after) == ("float32", "bfloat16"):
        return _fp32_to_bf16(numel)
    return _torch_cast(before, after, numel)


def _bf16_to_fp32(numel: int) -> Cast:
    """Return the cast from bfloat16 to float32: shift left by 16 bits, since a bfloat16 is a float32's upper half."""
    buffer = np.empty(numel, np.uint32)

    def cast(view: memoryview) -> memoryview:
        halves = np.frombuffer(view, np.uint16)
        words = buffer[: halves.size]
        words[:] = halves
        np.left_shift(words, 16, out=words)
        return words.data.cast("B")

    return cast


def _fp32_to_bf16(numel: int) -> Cast:
    """Return the cast from float32 to bfloat16, which rounds to nearest, ties to even.

    It adds 0x7FFF plus the lowest bit that stays, then drops the lower 16 bits.
    """
    buffer, rounded = np.empty(numel, np.uint32), np.empty(numel, np.uint16)

    def cast(view: memoryview) -> memoryview:
        values = np.frombuffer(view, np.float32)
        with np.errstate(invalid="ignore"):
            if np.isnan(values.max()):  # PyTorch's bits for NaN differ between CPUs
                return _torch_cast("float32", "bfloat16", numel)(view)
        bits, words, halves = values.view(np.uint32), buffer[: values.size], rounded[: values.size]
        np.right_shift(bits, 16, out=words)
        np.bitwise_and(words, 1, out=words)
        np.add(words, 0x7FFF, out=words)
        np.add(words, bits, out=words)
        np.right_shift(words, 16, out=words)
        halves[:] = words
        return halves.data.cast("B")

    return cast


def _torch_cast(before: str, after: str, numel: int) -> Cast:
    """Return the cast that PyTorch computes, `_SERIAL` elements per call."""
    import torch

    buffer = torch.empty(numel, dtype=getattr(torch, after))

    def cast(view: memoryview) -> memoryview:
        values = torch.frombuffer(view, dtype=getattr(torch, before))
        for low in range(0, values.numel(), _SERIAL):
            part = values[low : low + _SERIAL]
            buffer[low : low + part.numel()].copy_(part)
        return as_bytes(buffer[: values.numel()])

    return cast
