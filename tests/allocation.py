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

    Garbage collection frees objects of the block only, at its end: PyTorch's first selective recomputation in a process
    leaves two tensors in reference cycles. Earlier allocations are not freed in the block.
    """
    result = Allocated()
    gc.disable()
    gc.freeze()
    try:
        # One cycle has nothing to accumulate, but PyTorch before 2.13 warns unless `acc_events` is set.
        with profile(profile_memory=True, acc_events=True) as record:
            yield result
            gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    # Not `key_averages()`, which assigns allocations to operations by time: where two overlap, they would count twice.
    result.bytes = sum(event.nbytes() for event in record.kineto_results.events() if event.name() == "[memory]")
