"""How long one call of a piece of work takes on this rank while the other ranks do the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

Work = Callable[[], object]

# A sample is at least this long. Where ranks outnumber cores the system gives a core to one of them for a few
# milliseconds at a time: a shorter sample would see a core to itself or none at all, a longer one sees its share.
SAMPLE_S = 0.03
_LEAST_SAMPLES = 3


def wait(device: torch.device) -> None:
    """Returns once `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Work, device: torch.device, budget: float) -> float:
    """Median seconds of one call of `work`, from samples of many calls; about `budget` seconds are spent."""
    work()  # the first call compiles kernels and takes memory
    wait(device)
    calls = 1
    while (taken := lasting(work, calls, device)) < SAMPLE_S:
        calls = max(calls + 1, min(8 * calls, int(1.2 * calls * SAMPLE_S / taken)))
    samples = [taken]
    until = time.perf_counter() + budget - taken
    while len(samples) < _LEAST_SAMPLES or time.perf_counter() < until:
        samples.append(lasting(work, calls, device))
    return median(samples) / calls


def lasting(work: Work, calls: int, device: torch.device) -> float:
    """Seconds that `calls` calls of `work` take together."""
    wait(device)
    since = time.perf_counter()
    for _ in range(calls):
        work()
    wait(device)
    return time.perf_counter() - since
