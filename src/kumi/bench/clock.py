"""Time a function on this rank while the other ranks run the same function."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from kumi.accelerator import is_gpu

Work = Callable[[], object]

# The minimum duration of a sample, in seconds. If ranks outnumber cores, the scheduler gives a core to one of them for
# a few milliseconds at a time: a shorter sample would have the core all the time or never, a longer one has its share.
SAMPLE_S = 0.03
_MIN_SAMPLES = 3


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished its queued work."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def seconds_of(work: Work, device: torch.device, budget: float) -> float:
    """Return the median seconds per call of `work` over samples of many calls; spend about `budget` seconds."""
    work()  # the first call compiles kernels and allocates memory
    synchronize(device)
    calls = 1
    while (elapsed := elapsed_seconds(work, calls, device)) < SAMPLE_S:
        calls = max(calls + 1, min(8 * calls, int(1.2 * calls * SAMPLE_S / elapsed)))
    samples = [elapsed]
    until = time.perf_counter() + budget - elapsed
    while len(samples) < _MIN_SAMPLES or time.perf_counter() < until:
        samples.append(elapsed_seconds(work, calls, device))
    return median(samples) / calls


def elapsed_seconds(work: Work, calls: int, device: torch.device) -> float:
    """Return the seconds of `calls` consecutive calls of `work`."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - start
