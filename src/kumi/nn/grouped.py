"""Matrix products of many experts at once: rows that lie sorted by expert, each group with its own matrix.

To PyTorch's dispatcher each is one operator, whether there is a kernel for it or a product for every expert: selective
recomputation, FLOP counting and runs without content see it whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.numerics import products_of_experts
from kumi.nn.operators import define

# Columns of ones: as many as kernels want at least.
_ONES = 8


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows (N, out) of `rows` (N, in) times the transposed matrices of `weight` (X, out, in), in the dtype of `rows`.

    The first counts[0] rows have the first matrix, the next counts[1] the second, and so on; `counts` (X,) sums to N.
    """
    out: Tensor = _Grouped.apply(rows, weight.to(rows.dtype), counts)  # type: ignore[no-untyped-call]
    return out


def add_rows(rows: Tensor, bias: Tensor | None, counts: Tensor, *, silent: bool = False) -> Tensor:
    """Rows (N, out) with the row of `bias` (X, out) added that belongs to each one's group.

    `silent`: nothing is added here, but on another rank, whose sum with this one's is what counts; the gradient of the
    bias, which is that of the sum, is worked out here, too. Nothing but `counts` is kept.
    """
    if bias is None:
        return rows
    out: Tensor = _AddRows.apply(rows, bias, counts, silent)  # type: ignore[no-untyped-call]
    return out


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor, silent: bool) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.dtype = bias.dtype
        if silent:
            return rows.view_as(rows)
        # The host knows how many rows there are: the device need not tell.
        spread = bias.to(rows.dtype).repeat_interleave(counts, dim=0, output_size=len(rows))
        return spread.add_(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (counts,) = ctx.saved_tensors
        # Sums of groups, as a product with ones: in float32 inside of kernels, in one order, and without a copy.
        sums = OUTER(grad.contiguous(), grad.new_ones(len(grad), _ONES), counts)[..., 0]
        return grad, sums.to(ctx.dtype), None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight, counts)
        out: Tensor = TIMES(rows, weight.transpose(1, 2), counts)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = TIMES(grad, weight, counts) if ctx.needs_input_grad[0] else None
        grad_weight = OUTER(grad, rows, counts) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None


@products_of_experts()
def _times(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Each group of `rows` (N, a) times its own of `matrices` (X, a, b): (N, b)."""
    if _has_kernel(rows, matrices.shape[2]):
        return F.grouped_mm(rows, matrices, offs=counts.cumsum(0, dtype=torch.int32))
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    sizes = counts.tolist()
    for part, matrix, target in zip(torch.split(rows, sizes), matrices, torch.split(out, sizes), strict=True):
        target.copy_(torch.mm(_padded(part), matrix)[: len(part)])
    return out


@products_of_experts()
def _outer(grad: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """The products grad^T rows (X, b, a) of each group of `grad` (N, b) and `rows` (N, a); 0 where it is empty."""
    if _has_kernel(rows, grad.shape[1]):
        return F.grouped_mm(grad.T, rows, offs=counts.cumsum(0, dtype=torch.int32))
    sizes = counts.tolist()
    parts = zip(torch.split(grad, sizes), torch.split(rows, sizes), strict=True)
    return torch.stack([torch.mm(_padded(of_out).T, _padded(of_in)) for of_out, of_in in parts])


def _has_kernel(rows: Tensor, width: int) -> bool:
    """Whether PyTorch's grouped product takes `rows` (N, in) and matrices with `width` columns: none in float64, none
    that has no rows, and none whose rows do not begin at multiples of 16 bytes. On a CPU it is a loop over products of
    the sizes as they come, which is not wanted where sizes are compiled (see `_compiles`)."""
    if _compiles(rows):
        return False
    aligned = all(size * rows.element_size() % 16 == 0 for size in (rows.shape[1], width))
    return rows.dtype != torch.float64 and len(rows) > 0 and aligned


def _compiles(rows: Tensor) -> bool:
    """Whether a product of `rows` goes through oneDNN, which compiles and keeps a kernel for every size that it meets.

    On a CPU these are products in bfloat16 and float16, and in float32 where `kumi.nn.numerics` says so.
    """
    if rows.device.type != "cpu" or rows.dtype == torch.float64:
        return False
    return rows.dtype != torch.float32 or torch.get_float32_matmul_precision() != "highest"


def _padded(rows: Tensor) -> Tensor:
    """`rows` (n, width) with rows of zeros up to one of few sizes, where each size costs a compiled kernel.

    How many rows an expert gets is another number in every microbatch. oneDNN keeps some 0.7 MB for each: a part in its
    cache of 1024 primitives, the rest in a set of kernels that it never empties (ONEDNN_PRIMITIVE_CACHE_CAPACITY=0
    does not help there). With four sizes to each power of two the padding is 9 % of the rows on average.
    """
    size = block_size(len(rows)) if _compiles(rows) else len(rows)
    return rows if size == len(rows) else F.pad(rows, (0, 0, 0, size - len(rows)))


def block_size(count: int) -> int:
    """The smallest of 0, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40 ... that is not below `count`."""
    if count <= 8:
        return 8 if count else 0
    unit = 1 << ((count - 1).bit_length() - 3)
    return -(-count // unit) * unit


TIMES = define(
    "grouped_times",
    "(Tensor rows, Tensor matrices, Tensor counts) -> Tensor",
    _times,
    lambda rows, matrices, counts: rows.new_empty(rows.shape[0], matrices.shape[2]),
)
OUTER = define(
    "grouped_outer",
    "(Tensor grad, Tensor rows, Tensor counts) -> Tensor",
    _outer,
    lambda grad, rows, counts: rows.new_empty(counts.shape[0], grad.shape[1], rows.shape[1]),
)


@register_flop_formula(torch.ops.kumi.grouped_times)
def _times_flops(rows: tuple[int, ...], matrices: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Two for each element of the rows and column of its matrix."""
    return 2 * rows[0] * rows[1] * matrices[2]


@register_flop_formula(torch.ops.kumi.grouped_outer)
def _outer_flops(grad: tuple[int, ...], rows: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * rows[1] * grad[1]
