"""Measure the bytes of tensors that a block allocates and does not free, for tests of saved activations."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.autograd.profiler import profile


@dataclass
class Allocated:
    """Bytes of tensors that were allocated and not freed."""

    bytes: int = 0


@contextmanager
def count_allocated() -> Iterator[Allocated]:
    """Count the bytes that the block allocates and does not free.

    Garbage collection is off in the block, so earlier allocations are not freed in it.
    """
    result = Allocated()
    gc.disable()
    try:
        # One cycle has nothing to accumulate, but PyTorch before 2.13 warns unless `acc_events` is set.
        with profile(profile_memory=True, acc_events=True) as record:
            yield result
    finally:
        gc.enable()
    result.bytes = sum(event.self_cpu_memory_usage for event in record.key_averages())
