"""What memory this process holds, and giving back to the system what the C library keeps without need."""

from __future__ import annotations

import ctypes
import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kumi.config import ResolvedRun
from kumi.errors import DeviceMemoryError

# Steps between trims: one costs about a tenth of a second of page faults, and what piles up in between is small.
TRIM_EVERY = 25

# Of glibc's malloc.h. A larger threshold is refused; by default it grows up to this one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -1, -3, 32 << 20


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


def keep_freed_memory() -> None:
    """Have the C library keep what tensors free until the next `trim`, where it is glibc.

    By default it returns the free end of its heap to the system several times a step: 60,000 page faults a step with a
    model of 23 million parameters, a twentieth to a tenth of its time.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def memory_errors(run: ResolvedRun) -> Iterator[None]:
    """Turn every way in which a GPU or this machine says that it has no memory left into a DeviceMemoryError."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise DeviceMemoryError(_remedy(run, error)) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out: CUDA's, Python's, the system's, or that of torch's CPU allocator."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error)
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in words or "not enough memory" in words)


def _remedy(run: ResolvedRun, error: BaseException) -> str:
    layout, words = run.layout, str(error).splitlines() or [type(error).__name__]
    where = "the device" if isinstance(error, torch.OutOfMemoryError) else "this machine"
    remedies = [
        f"layout.microbatch={layout.microbatch // 2}" if layout.microbatch > 1 else "",
        "layout.recompute=full" if layout.recompute != "full" else "",
        "layout.zero=3" if layout.dp > 1 and layout.zero < 3 else "",
    ]
    return (
        f"{where} ran out of memory ({words[0]}) with microbatch={layout.microbatch}, recompute={layout.recompute}, "
        f"zero={layout.zero}; try {', '.join(filter(None, [*remedies, 'more devices']))}; the same command goes on "
        f"from the last checkpoint"
    )
