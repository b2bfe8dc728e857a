"""What memory this process holds, and giving back to the system what the C library keeps without need."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch

# Steps between trims: one costs about a tenth of a second of page faults, and what piles up in between is small.
TRIM_EVERY = 25


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_now(device: torch.device) -> int:
    """Bytes held before a model is there: what the interpreter and its libraries take on a CPU, nothing on a GPU."""
    if device.type == "cuda":
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def trim(device: torch.device) -> None:
    """Return freed memory to the system, where tensors come from the C library's heap.

    Tensors of many sizes come and go in a step, and what is freed between two that live stays with the process. Only
    glibc has this call, and this habit.
    """
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
