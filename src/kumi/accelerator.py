"""What a device can do. All that only CUDA has is in this file.

PyTorch calls the GPUs of AMD "cuda", too, in its builds for ROCm, and their numbers of compute capability are not
NVIDIA's. So a feature asks `can` for what it needs, by a row of `CAPABILITIES`, and takes its plain path where the
answer is no. docs/gpu.md has the table.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# PyTorch's name of the devices of NVIDIA and AMD.
GPU = "cuda"
_CUDA_ERROR_NOT_INITIALIZED = 3


class Capability(NamedTuple):
    """What a GPU may be able to do.

    `cuda`: the least compute capability of NVIDIA's GPUs that have it; `below`: the least one that no longer has it.
    `rocm`: True if kumi uses it with PyTorch for ROCm. PyTorch checks that it works, or kumi's comparison of kernels at
        the first start on a GPU does.
    `plain`: what happens without it.
    """

    cuda: tuple[int, int]
    rocm: bool
    plain: str
    below: tuple[int, int] = (999, 0)


# What `can` may be asked -> which GPUs have it.
CAPABILITIES = {
    "packed flash attention": Capability((8, 0), True, "attention with a mask of all pairs of tokens"),
    "flash attention 3": Capability((9, 0), False, "PyTorch's flash attention", below=(10, 0)),
    "flash attention 4": Capability((9, 0), False, "PyTorch's flash attention", below=(11, 0)),
    "FlexAttention": Capability((8, 0), True, "attention in blocks of queries"),
    "float32 results of 16-bit products": Capability((8, 0), False, "a product in 16 bits, and a sum in float32"),
    "float8": Capability((8, 9), False, "refused with the remedy precision.kind = 'bf16'"),
    "float8 by rows": Capability((9, 0), False, "a scale for each matrix"),
    "symmetric memory": Capability((8, 0), False, "refused with the remedy comm.async_tp = false"),
}


# Capabilities that failed or were wrong on this process's GPU.
_refused: set[str] = set()


def is_gpu(device: torch.device) -> bool:
    """Return True if `device` is a GPU, of NVIDIA or AMD."""
    return device.type == GPU


def is_rocm() -> bool:
    """Return True if PyTorch was built for AMD's GPUs."""
    import torch

    return torch.version.hip is not None


def can(device: torch.device, capability: str) -> bool:
    """Return True if `device` has the `capability`, a key of `CAPABILITIES`. A CPU has none of them."""
    needs = CAPABILITIES[capability]
    if not is_gpu(device) or capability in _refused:
        return False
    return needs.rocm if is_rocm() else needs.cuda <= _compute_capability(device) < needs.below


def refuse(capability: str, *, refused: bool) -> None:
    """Let `can` answer no for `capability` in this process if `refused`; else let it ask the device again."""
    if refused:
        _refused.add(capability)
    else:
        _refused.discard(capability)


def _compute_capability(device: torch.device) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device)


def driver_has_started() -> bool:
    """Return True if this process has used a GPU, so that its forks cannot. With ROCm, return True always.

    Libraries may have started CUDA without PyTorch, so NVIDIA's driver is asked. AMD's cannot be asked.
    """
    import torch

    if is_rocm() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # the driver is not loaded
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED)
