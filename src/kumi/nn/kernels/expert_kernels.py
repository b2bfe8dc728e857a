"""Triton kernels that copy tokens to the rows of their experts, and sum the rows back with the routing weights.

They are the permutation and its inverse of MegaBlocks (Gale et al., 2022, arXiv:2211.15841), without padding: row
places[t, j] belongs to token t and the j-th expert that it chose (`kumi.nn.moe.sorted_places`). A program processes all
k rows of one token, in all columns or in a block of them, so that nothing is read or written twice.

Bytes moved for T tokens of D numbers of 2 bytes, k experts each, in units of 2 T D: k + 1 in `spread_tokens` and in
`sum_rows`, 2 k + 1 in `sum_rows_backward`. With the backward pass of `spread_tokens`, which is `sum_rows`, they add up
to 5 k + 4. The plain path reads and writes float32 sums k times: about 30 k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kumi.nn.custom_ops import define_op

# Numbers that a program has in registers at a time: as many columns of a token's k rows as fit.
_TILE = 4096


@triton.jit
def spread_tokens(x, places, rows, size, CHOICES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy each token of `x` (T, size) to its CHOICES rows of `rows` (T * CHOICES, size).

    `places` (T, CHOICES): the rows of each token. LANES: CHOICES, rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, LANES)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + token * CHOICES + choices, mask=choices < CHOICES, other=0).to(tl.int64)
    values = tl.load(x + token * size + columns, mask=columns < size, other=0.0)
    inside = (choices < CHOICES)[:, None] & (columns < size)[None, :]
    targets = rows + place[:, None] * size + columns[None, :]
    tl.store(targets, tl.broadcast_to(values[None, :], (LANES, BLOCK)), mask=inside)


@triton.jit
def sum_rows(
    rows,
    weights,
    places,
    out,
    size,
    WEIGHTED: tl.constexpr,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write to `out` (T, size) for each token the sum of its rows in `rows`.

    If WEIGHTED, each row is multiplied by its weight in `weights` (T, CHOICES).

    The sum is in float32. The other arguments are those of `spread_tokens`.
    """
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, LANES)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + token * CHOICES + choices, mask=choices < CHOICES, other=0).to(tl.int64)
    inside = (choices < CHOICES)[:, None] & (columns < size)[None, :]
    values = tl.load(rows + place[:, None] * size + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + token * CHOICES + choices, mask=choices < CHOICES, other=0.0)
        values *= weight[:, None]
    total = tl.sum(values, 0)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=columns < size)


@triton.jit
def sum_rows_backward(
    grad,
    rows,
    weights,
    places,
    grad_rows,
    grad_weights,
    size,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of `sum_rows`, given `grad` (T, size). A program computes one token.

    `grad_rows` of a row: its weight times the token's gradient. `grad_weights` (T, CHOICES): the dot product of the
    row and the token's gradient, in float32.
    """
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, LANES)
    chosen = choices < CHOICES
    place = tl.load(places + token * CHOICES + choices, mask=chosen, other=0).to(tl.int64)
    weight = tl.load(weights + token * CHOICES + choices, mask=chosen, other=0.0)
    dots = tl.zeros((LANES,), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = chosen[:, None] & (columns < size)[None, :]
        offsets = place[:, None] * size + columns[None, :]
        gradient = tl.load(grad + token * size + columns, mask=columns < size, other=0.0).to(tl.float32)
        values = tl.load(rows + offsets, mask=inside, other=0.0).to(tl.float32)
        dots += tl.sum(values * gradient[None, :], 1)
        scaled = weight[:, None] * gradient[None, :]
        tl.store(grad_rows + offsets, scaled.to(grad_rows.dtype.element_ty), mask=inside)
    tl.store(grad_weights + token * CHOICES + choices, dots, mask=chosen)


def _blocks(places: Tensor, size: int) -> dict[str, int]:
    """Return the constants of all kernels for `places` (T, k) and rows of `size` numbers."""
    lanes = triton.next_power_of_2(places.shape[1])
    block = min(max(_TILE // lanes, 64), triton.next_power_of_2(size))
    return {"CHOICES": places.shape[1], "LANES": lanes, "BLOCK": block}


def _to_experts(x: Tensor, places: Tensor) -> Tensor:
    rows, blocks = x.new_empty(places.numel(), x.shape[1]), _blocks(places, x.shape[1])
    if rows.numel():
        grid = len(places), triton.cdiv(x.shape[1], blocks["BLOCK"])
        spread_tokens[grid](x.contiguous(), places.contiguous(), rows, x.shape[1], **blocks)
    return rows


def _from_experts(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    size, blocks = rows.shape[1], _blocks(places, rows.shape[1])
    out = rows.new_empty(len(places), size)
    if out.numel():
        grid, is_weighted = (len(places), triton.cdiv(size, blocks["BLOCK"])), weights is not None
        factors = rows if weights is None else weights.contiguous()  # without weights, the pointer is not used
        sum_rows[grid](rows.contiguous(), factors, places.contiguous(), out, size, WEIGHTED=is_weighted, **blocks)
    return out


def _from_experts_backward(grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    rows, weights = rows.contiguous(), weights.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    if rows.numel():
        inputs = grad.contiguous(), rows, weights, places.contiguous()
        blocks = _blocks(places, rows.shape[1])
        sum_rows_backward[(len(places),)](*inputs, grad_rows, grad_weights, rows.shape[1], **blocks)
    return grad_rows, grad_weights


to_experts = define_op(
    "to_experts",
    "(Tensor x, Tensor places) -> Tensor",
    _to_experts,
    lambda x, places: x.new_empty(places.numel(), x.shape[1]),
)
from_experts = define_op(
    "from_experts",
    "(Tensor rows, Tensor? weights, Tensor places) -> Tensor",
    _from_experts,
    lambda rows, weights, places: rows.new_empty(places.shape[0], rows.shape[1]),
)
from_experts_backward = define_op(
    "from_experts_backward",
    "(Tensor grad, Tensor rows, Tensor weights, Tensor places) -> (Tensor, Tensor)",
    _from_experts_backward,
    lambda grad, rows, weights, places: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
)
