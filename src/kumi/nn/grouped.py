"""Matrix products of many experts at once: rows that lie sorted by expert, each group with its own matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows (N, out) of `rows` (N, in) times the transposed matrices of `weight` (X, out, in), in the dtype of `rows`.

    The first counts[0] rows have the first matrix, the next counts[1] the second, and so on; `counts` (X,) sums to N.
    """
    out: Tensor = _Grouped.apply(rows, weight.to(rows.dtype), counts)  # type: ignore[no-untyped-call]
    return out


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        return _times(rows, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = _times(grad, weight, counts) if ctx.needs_input_grad[0] else None
        grad_weight = _outer(grad, rows, counts) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None


def _times(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Each group of `rows` (N, a) times its own of `matrices` (X, a, b): (N, b)."""
    if _has_kernel(rows, matrices.shape[2]):
        return F.grouped_mm(rows, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    parts = zip(torch.split(rows, counts.tolist()), matrices, strict=True)
    return torch.cat([torch.mm(part, matrix) for part, matrix in parts])


def _outer(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """The products grad^T rows (X, b, a) of each group of `grad` (N, b) and `rows` (N, a); 0 where it is empty."""
    if _has_kernel(rows, grad.shape[1]):
        return F.grouped_mm(grad.T, rows, offs=counts.cumsum(0, dtype=torch.int32))
    sizes = counts.tolist()
    parts = zip(torch.split(grad, sizes), torch.split(rows, sizes), strict=True)
    return torch.stack([torch.mm(of_out.T, of_in) for of_out, of_in in parts])


def _flops(a: tuple[int, ...], b: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two for each element of `a` (N, in) and column of its matrix of `b` (X, in, out), or of `a` (out, N) and column
    of `b` (N, in)."""
    return 2 * a[0] * a[1] * b[-1]


# PyTorch's counter knows the kernel from some version on.
if torch.ops.aten._grouped_mm not in flop_registry:
    register_flop_formula(torch.ops.aten._grouped_mm)(_flops)


def _has_kernel(rows: Tensor, width: int) -> bool:
    """Whether PyTorch's grouped product takes `rows` (N, in) and matrices with `width` columns: none in float64, none
    that has no rows, and none whose rows do not begin at multiples of 16 bytes."""
    aligned = all(size * rows.element_size() % 16 == 0 for size in (rows.shape[1], width))
    return rows.dtype != torch.float64 and len(rows) > 0 and aligned
