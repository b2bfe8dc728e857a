"""Triton kernels for the loss head: log-probs of labels and the gradient of the logits, for one chunk of logits.

The head's matmuls stay PyTorch's. The kernels replace what is between them, as in Liger (Hsu et al., 2024,
arXiv:2410.10989): one pass over the product gives the log-sum-exp of each row, by the online softmax of Milakov and
Gimelshein (2018, arXiv:1805.02867), and a second one overwrites the product with its gradient.

Bytes moved for each logit of 2 bytes, matmuls apart: 2 in `score_rows` and 4 in `write_errors`. The plain path copies
the product to float32, and moves 28.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kumi.nn.custom_ops import define_op

# Columns of the product that a program has in registers at a time.
_COLUMNS = 4096


@triton.jit
def _shaped(product, scale, softcap, CAPPED: tl.constexpr):
    """Return the logits of a part of the product, in float32."""
    logits = product.to(tl.float32) * scale
    if CAPPED:
        # softcap * tanh(x), with tanh(|x|) = (1 - exp(-2 |x|)) / (1 + exp(-2 |x|))
        power = tl.exp(-2 * tl.abs(logits / softcap))
        capped = softcap * (1 - power) / (1 + power)
        logits = tl.where(logits < 0, -capped, capped)
    return logits


@triton.jit
def score_rows(
    product,
    rows,
    numbers,
    width,
    spacing,
    columns,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write four numbers for each token. A program computes one token.

    `product` (tokens, width): the first `columns` columns are logits before `_shaped`.
    `rows` (tokens,): the row of the head's matrix with the token's label, which is the label's column in `product`;
    negative if another rank has it.
    `numbers` (4, tokens), float32, whose rows are `spacing` elements apart: the largest logit l,
    log(sum exp(logits - l)), the label's logit (0 if another rank has it), and the entropy in nats if ENTROPY.
    """
    token = tl.program_id(0).to(tl.int64)
    product += token * width
    numbers += token
    lanes = tl.arange(0, BLOCK)
    largest = float("-inf")
    sums = tl.zeros((BLOCK,), tl.float32)  # of exp(logits - largest), one for each lane
    weighted = tl.zeros((BLOCK,), tl.float32)  # of exp(logits - largest) * (logits - largest)
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        logits = _shaped(tl.load(product + start + lanes, mask=inside, other=0.0), scale, softcap, CAPPED)
        before = largest
        largest = tl.maximum(before, tl.max(tl.where(inside, logits, float("-inf")), 0))
        below = tl.where(inside, logits - largest, 0.0)
        powers = tl.where(inside, tl.exp(below), 0.0)
        shrink = tl.exp(before - largest)
        if ENTROPY:
            # In the first block `before` is -inf, and the sums are 0.
            fall = tl.where(start == 0, 0.0, before - largest)
            weighted = shrink * (weighted + sums * fall) + powers * below
        sums = sums * shrink + powers
    total = tl.sum(sums, 0)
    log_total = tl.log(total)
    row = tl.load(rows + token)
    label = _shaped(tl.load(product + row, mask=row >= 0, other=0.0), scale, softcap, CAPPED)
    tl.store(numbers, largest)
    tl.store(numbers + spacing, log_total)
    tl.store(numbers + 2 * spacing, label)
    if ENTROPY:
        # Rounding may make the entropy of a sure prediction negative.
        tl.store(numbers + 3 * spacing, tl.maximum(log_total - tl.sum(weighted, 0) / total, 0.0))


@triton.jit
def write_errors(
    product, rows, numbers, width, spacing, columns, scale, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Overwrite `product` (tokens, width) with (softmax - onehot(label)) * slope: 0 beyond `columns`.

    `slope` is the derivative of the cap; the factor `scale` is left to the caller. The softmax is
    exp((logit - l) - r) with l = numbers[0] and r = numbers[1]. A program computes BLOCK columns of one token.
    """
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    product += token * width
    numbers += token
    largest, rest, row = tl.load(numbers), tl.load(numbers + spacing), tl.load(rows + token)
    logits = _shaped(tl.load(product + lanes, mask=lanes < columns, other=0.0), scale, softcap, CAPPED)
    errors = tl.exp((logits - largest) - rest) - tl.where(lanes == row, 1.0, 0.0)
    if CAPPED:
        relative = logits / softcap
        errors *= 1 - relative * relative
    errors = tl.where(lanes < columns, errors, 0.0)
    tl.store(product + lanes, errors.to(product.dtype.element_ty), mask=lanes < width)


def _scores(
    product: Tensor, rows: Tensor, numbers: Tensor, columns: int, scale: float, softcap: float, entropy: bool
) -> None:
    sizes = (product.stride(0), numbers.stride(0), columns, scale, softcap)
    if len(product):
        options: dict[str, Any] = {"CAPPED": softcap > 0, "BLOCK": _block(product), "num_warps": 8}
        score_rows[(len(product),)](product, rows, numbers, *sizes, ENTROPY=entropy, **options)


def _errors(product: Tensor, rows: Tensor, numbers: Tensor, columns: int, scale: float, softcap: float) -> None:
    sizes, block = (product.stride(0), numbers.stride(0), columns, scale, softcap), _block(product)
    if len(product):
        options: dict[str, Any] = {"CAPPED": softcap > 0, "BLOCK": block, "num_warps": 8}
        write_errors[len(product), triton.cdiv(product.shape[1], block)](product, rows, numbers, *sizes, **options)


def _block(product: Tensor) -> int:
    return int(min(_COLUMNS, triton.next_power_of_2(product.shape[1])))


_ARGUMENTS = "Tensor rows, {} numbers, int columns, float scale, float softcap"
scores_ = define_op(
    "loss_scores_", f"(Tensor product, {_ARGUMENTS.format('Tensor(a!)')}, bool entropy) -> ()", _scores, lambda *_: None
)
errors_ = define_op(
    "loss_errors_", f"(Tensor(a!) product, {_ARGUMENTS.format('Tensor')}) -> ()", _errors, lambda *_: None
)
