"""Grouped matrix products: rows sorted by expert, each group with its own matrix.

Each product is one operator of PyTorch's dispatcher, whether a grouped kernel or a loop over the experts computes it.
Selective recomputation, FLOP counting and fake tensors see that operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.custom_ops import define_op
from kumi.nn.numerics import expert_matmul_precision

# Columns of ones by which a product sums rows: the smallest number that the kernels support.
_ONES_COLUMNS = 8


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, ends: Tensor | None = None) -> Tensor:
    """Return rows (N, out): each of `rows` (N, in) times the transposed matrix of its group, in the dtype of `rows`.

    The first counts[0] rows use the first matrix of `weight` (X, out, in), and so on. `counts` (X,) sums to N. `ends`:
    `row_ends(counts)`, from callers that compute several products of the same rows.
    """
    ends = row_ends(counts) if ends is None else ends
    out: Tensor = _GroupedLinear.apply(rows, weight.to(rows.dtype), counts, ends)  # type: ignore[no-untyped-call]
    return out


def row_ends(counts: Tensor) -> Tensor:
    """Return the number of rows (X,) up to the end of each group in int32, as kernels take them."""
    return counts.cumsum(0, dtype=torch.int32)


def add_expert_bias(rows: Tensor, bias: Tensor | None, counts: Tensor, *, other_rank_adds: bool = False) -> Tensor:
    """Return `rows` (N, out), each plus the row of `bias` (X, out) of its group. Backward keeps only `counts`.

    `other_rank_adds`: return `rows` unchanged, because another rank adds the bias to the sum over ranks. This rank
    computes the gradient of the bias nevertheless, from the gradient of the sum, which every rank has.
    """
    if bias is None:
        return rows
    out: Tensor = _AddExpertBias.apply(rows, bias, counts, other_rank_adds)  # type: ignore[no-untyped-call]
    return out


class _AddExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor, other_rank_adds: bool) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.dtype = bias.dtype
        if other_rank_adds:
            return rows.view_as(rows)
        # With `output_size`, the host need not wait for the device to know the size of the result.
        spread = bias.to(rows.dtype).repeat_interleave(counts, dim=0, output_size=len(rows))
        return spread.add_(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        # Sum the groups by a product with ones: kernels accumulate in float32, in a fixed order, without a copy.
        ones = grad.new_ones(len(grad), _ONES_COLUMNS)
        sums = GROUPED_OUTER(grad.contiguous(), ones, counts, row_ends(counts))[..., 0]
        return grad, sums.to(ctx.dtype), None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight, counts, ends)
        out: Tensor = GROUPED_MATMUL(rows, weight.transpose(1, 2), counts, ends)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, counts, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = GROUPED_MATMUL(grad, weight, counts, ends) if ctx.needs_input_grad[0] else None
        grad_weight = GROUPED_OUTER(grad, rows, counts, ends) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None, None


@expert_matmul_precision()
def _times(rows: Tensor, matrices: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    """Return (N, b): each group of `rows` (N, a) times its matrix of `matrices` (X, a, b)."""
    if _has_kernel(rows, matrices.shape[2]):
        return F.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    sizes = counts.tolist()
    for part, matrix, target in zip(torch.split(rows, sizes), matrices, torch.split(out, sizes), strict=True):
        target.copy_(torch.mm(_pad(part), matrix)[: len(part)])
    return out


@expert_matmul_precision()
def _outer(grad: Tensor, rows: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    """Return (X, b, a): grad^T rows of each group of `grad` (N, b) and `rows` (N, a); 0 for an empty group."""
    if _has_kernel(rows, grad.shape[1]):
        return F.grouped_mm(grad.T, rows, offs=ends)
    sizes = counts.tolist()
    parts = zip(torch.split(grad, sizes), torch.split(rows, sizes), strict=True)
    return torch.stack([torch.mm(_pad(grad_part).T, _pad(row_part)) for grad_part, row_part in parts])


def _has_kernel(rows: Tensor, width: int) -> bool:
    """Return True if F.grouped_mm supports `rows` (N, in) and matrices with `width` columns, and should be used.

    F.grouped_mm does not support float64, no rows at all, or rows that are not aligned to 16 bytes. On a CPU, it loops
    over products of every size, so it is not used if each size costs a compiled kernel (see `_compiles_kernels`).
    """
    if _compiles_kernels(rows):
        return False
    aligned = all(size * rows.element_size() % 16 == 0 for size in (rows.shape[1], width))
    return rows.dtype != torch.float64 and len(rows) > 0 and aligned


def _compiles_kernels(rows: Tensor) -> bool:
    """Return True if a product of `rows` uses oneDNN, which compiles and keeps a kernel for each size.

    On a CPU, PyTorch uses oneDNN for bfloat16 and float16, and for float32 if `kumi.nn.numerics` chose it.
    """
    if rows.device.type != "cpu" or rows.dtype == torch.float64:
        return False
    return rows.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"


def _pad(rows: Tensor) -> Tensor:
    """Return `rows` (n, width), padded with zero rows to one of few sizes if each size costs a compiled kernel.

    An expert gets a different number of rows in every microbatch. oneDNN keeps some 0.7 MB for each size: a part in its
    cache of 1024 primitives, the rest in a set of kernels that it never frees (ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 does
    not change that). With four sizes per power of two, padding adds 9 % of the rows on average.
    """
    size = padded_size(len(rows)) if _compiles_kernels(rows) else len(rows)
    return rows if size == len(rows) else F.pad(rows, (0, 0, 0, size - len(rows)))


def padded_size(count: int) -> int:
    """Return the smallest of 0, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 ... that is at least `count`."""
    if count <= 8:
        return 8 if count else 0
    unit = 1 << ((count - 1).bit_length() - 3)
    return -(-count // unit) * unit


GROUPED_MATMUL = define_op(
    "grouped_times",
    "(Tensor rows, Tensor matrices, Tensor counts, Tensor ends) -> Tensor",
    _times,
    lambda rows, matrices, counts, ends: rows.new_empty(rows.shape[0], matrices.shape[2]),
)
GROUPED_OUTER = define_op(
    "grouped_outer",
    "(Tensor grad, Tensor rows, Tensor counts, Tensor ends) -> Tensor",
    _outer,
    lambda grad, rows, counts, ends: rows.new_empty(counts.shape[0], grad.shape[1], rows.shape[1]),
)


@register_flop_formula(torch.ops.kumi.grouped_times)
def _times_flops(rows: tuple[int, ...], matrices: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return 2 FLOPs for each element of the rows and each column of its matrix."""
    return 2 * rows[0] * rows[1] * matrices[2]


@register_flop_formula(torch.ops.kumi.grouped_outer)
def _outer_flops(grad: tuple[int, ...], rows: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * grad[1]
