"""The CPU numerics of this process: how it computes products and attention (see `kumi.spec.numerics`).

Until `use_numerics` is called, float32 matrices are multiplied by PyTorch's default library, and attention is computed
in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kumi.nn.cpu_matmul import enable_fast_float32
from kumi.spec.numerics import Numerics, attention_case

_flash: frozenset[str] = frozenset()
_mixed = False


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
