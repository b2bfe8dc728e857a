"""How this process computes on its CPU, of the ways that `kumi.spec.numerics` names.

Before `use` is called that is PyTorch's default product of float32 matrices, and attention in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kumi.nn.matmul import enable_fast_float32
from kumi.spec.numerics import Numerics, attention_case

_flash: frozenset[str] = frozenset()
_mixed = False


def use(numerics: Numerics) -> None:
    """Compute as `numerics` says from now on, in this process. Products by oneDNN are used only where they pass
    `enable_fast_float32`'s check of their accuracy."""
    global _flash, _mixed
    _flash, _mixed = frozenset(numerics.flash), numerics.products == "mixed"
    if numerics.products == "default":
        torch.set_float32_matmul_precision("highest")
    else:
        enable_fast_float32()


@contextmanager
def products_of_experts() -> Iterator[None]:
    """Inside, float32 matrices are multiplied as those of experts are to be."""
    before = torch.get_float32_matmul_precision()
    if not _mixed or before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def uses_flash(dtype: torch.dtype, length: float) -> bool:
    """Return whether PyTorch's flash kernel computes attention in `dtype` over documents of `length` tokens."""
    return attention_case(dtype.itemsize, length) in _flash
