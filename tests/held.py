"""How much memory a piece of work leaves behind, for tests of what is kept for the backward pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Held:
    """Bytes of tensors that were made and not freed."""

    bytes: int = 0


@contextmanager
def held() -> Iterator[Held]:
    """Counts within; nothing that was made before is freed meanwhile, for garbage is collected only before."""
    found = Held()
    gc.collect()
    gc.disable()
    try:
        # One cycle has nothing to accumulate, but without `acc_events` PyTorch before 2.13 warns that it does not.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
            yield found
    finally:
        gc.enable()
    found.bytes = sum(event.self_cpu_memory_usage for event in record.key_averages())
