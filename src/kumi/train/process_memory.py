"""Measure the memory of this process, return freed memory to the system, and explain out-of-memory errors."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kumi.accelerator import is_gpu
from kumi.config import ResolvedRun
from kumi.errors import DeviceMemoryError

# Steps between two calls of `trim_heap`. A call costs about a tenth of a second of page faults, and little freed memory
# piles up between two calls.
TRIM_EVERY = 25

# Constants of glibc's malloc.h. The mmap threshold grows up to 32 MiB by default; mallopt rejects a larger one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -1, -3, 32 << 20


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process in bytes, since `baseline_memory` was called.

    On a GPU it is the allocated memory, on a CPU the resident memory without the pages of files: libraries and tokens,
    which ranks share.
    """
    if is_gpu(device):
        return torch.cuda.max_memory_allocated(device)
    sizes = _resident_bytes()
    return sizes["VmHWM"] - sizes["RssFile"]


def held_memory(device: torch.device) -> dict[str, int]:
    """Return two figures in bytes that a GPU's allocated memory does not include; {} on a CPU.

    `reserved`: the peak that PyTorch took from the GPU, with holes between tensors.
    `free`: what no process has taken now. What is neither reserved nor free belongs to contexts, libraries, NCCL's
    buffers and other processes.
    """
    if not is_gpu(device):
        return {}
    free, _ = torch.cuda.mem_get_info(device)
    return {"reserved": torch.cuda.max_memory_reserved(device), "free": free}


def baseline_memory(device: torch.device) -> int:
    """Return the bytes that are in use before the model is built, 0 on a GPU, and reset the measured peak.

    On a CPU they belong to the interpreter and its modules. A single rank is the process that prepared the data, which
    may have used more memory than training does.
    """
    if is_gpu(device):
        return 0
    with suppress(OSError):  # a system that forbids it keeps the peak of preparing the data
        Path("/proc/self/clear_refs").write_text("5")
    sizes = _resident_bytes()
    return sizes["VmRSS"] - sizes["RssFile"]


def _resident_bytes() -> dict[str, int]:
    """Return the figures on resident memory of Linux's /proc/self/status, in bytes.

    `VmRSS`: now.
    `VmHWM`: at the peak.
    `RssFile`: the pages of files in it now.
    """
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    figures = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}
    return {name: figures.get(name, 0) for name in ("VmRSS", "VmHWM", "RssFile")}


def trim_heap(device: torch.device) -> None:
    """Return freed heap memory to the system on a CPU with glibc.

    A step allocates and frees tensors of many sizes, and glibc keeps freed memory that lies between live tensors.
    """
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory until the next `trim_heap`.

    By default, glibc returns the free end of its heap to the system several times per step. With a model of 23 million
    parameters, this causes 60,000 page faults per step, which take 5 to 10% of the step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def convert_memory_errors(run: ResolvedRun) -> Iterator[None]:
    """Convert every out-of-memory error of a GPU or this machine into a DeviceMemoryError with advice."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(_out_of_memory_message(run, error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` is an out-of-memory error of CUDA, Python, the system or torch's CPU allocator."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error)
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in words or "not enough memory" in words)


def _out_of_memory_message(run: ResolvedRun, error: BaseException) -> str:
    """Return the message for `error`, with the keys of the run file that would save memory."""
    layout, words = run.layout, str(error).splitlines() or [type(error).__name__]
    subject = "the device" if isinstance(error, torch.OutOfMemoryError) else "this machine"
    remedies = [
        f"layout.microbatch={layout.microbatch // 2}" if layout.microbatch > 1 else "",
        "layout.recompute=full" if layout.recompute != "full" else "",
        "layout.zero=3" if layout.dp > 1 and layout.zero < 3 else "",
    ]
    return (
        f"{subject} ran out of memory ({words[0]}) with microbatch={layout.microbatch}, recompute={layout.recompute}, "
        f"zero={layout.zero}; try {', '.join(filter(None, [*remedies, 'more devices']))}; the same command resumes "
        f"from the last checkpoint"
    )
