"""The numerics of this process: the kernels and libraries by which it computes (see `kumi.spec.numerics`).

Until `use_numerics` is called, a CPU multiplies float32 matrices by PyTorch's default library and computes attention in
blocks. Until `use_kernels` is called, all operations of `kumi.spec.numerics.KERNELS` are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import torch

from kumi.accelerator import refuse
from kumi.errors import ConfigError
from kumi.nn.cpu_matmul import enable_fast_float32
from kumi.spec.numerics import KERNEL_PACKAGES, KERNELS, Numerics, attention_case

# The attention cases (see `kumi.spec.numerics.attention_case`) that PyTorch's flash kernel computes.
_flash: frozenset[str] = frozenset()
# True if PyTorch's default library computes experts' products, and oneDNN the others.
_mixed = False
# Operation -> the module that computes it.
_kernels: dict[str, ModuleType] = {}

# (operation, implementation) of `kumi.spec.numerics.KERNELS` -> its module. Imported only if chosen.
_MODULES = {
    ("loss", "triton"): "kumi.nn.kernels.loss_kernels",
    ("experts", "triton"): "kumi.nn.kernels.expert_kernels",
    ("rotation", "triton"): "kumi.nn.kernels.rotation_kernels",
    ("scan", "mamba-ssm"): "kumi.nn.kernels.mamba_ssm_scan",
    ("scan", "triton"): "kumi.nn.kernels.scan_kernels",
}


def use_numerics(numerics: Numerics) -> None:
    """Set the CPU numerics of this process.

    oneDNN is used for float32 products only if it passes the accuracy check of `enable_fast_float32`.
    """
    global _flash, _mixed
    _flash, _mixed = frozenset(numerics.flash), numerics.products == "mixed"
    if numerics.products == "default":
        torch.set_float32_matmul_precision("highest")
    else:
        enable_fast_float32()


@contextmanager
def expert_matmul_precision() -> Iterator[None]:
    """Multiply float32 matrices inside this context in the precision that is chosen for experts."""
    if not _mixed:
        yield
        return
    with small_matmul_precision():
        yield


@contextmanager
def small_matmul_precision() -> Iterator[None]:
    """Multiply float32 matrices inside this context by PyTorch's default library.

    oneDNN prepares a kernel for every product, which takes longer than a product of a few rows: attention of one query
    over 90 keys took 8 times as long with it (batches of 8 and of 64, on an AMD EPYC).
    """
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def uses_flash(dtype: torch.dtype, length: float) -> bool:
    """Return True if PyTorch's flash kernel computes attention in `dtype` over documents of `length` tokens."""
    return attention_case(dtype.itemsize, length) in _flash


def use_kernels(kernels: Sequence[tuple[str, str]]) -> None:
    """Compute the operations of `KERNELS` by their implementations in `kernels`, or else by PyTorch's operations.

    The pair ("attention", "masked") switches packed flash attention off. Pairs for newer versions of flash attention,
    or for a setting that is off (compile, float8, async_tp), are left to the caller. Raise ConfigError if a kernel's
    package cannot be imported.
    """
    global _kernels
    _kernels = {name: load_kernel(name, implementation) for name, implementation in kernels if name in KERNELS}
    refuse("packed flash attention", refused=("attention", "masked") in kernels)


def load_kernel(operation: str, implementation: str) -> ModuleType:
    """Return the module that computes `operation` by `implementation`; ConfigError if it cannot be imported."""
    try:
        return import_module(_MODULES[operation, implementation])
    except ImportError as error:
        raise ConfigError(
            f"precision.kernels: {operation}:{implementation} cannot be imported ({error}); install "
            f"{KERNEL_PACKAGES[implementation][0]}, which {KERNEL_PACKAGES[implementation][1]}, or set "
            f"precision.kernels = 'torch'"
        ) from None


def kernel(operation: str) -> ModuleType | None:
    """Return the module with the chosen kernel of `operation`, or None for PyTorch's operations."""
    return _kernels.get(operation)
