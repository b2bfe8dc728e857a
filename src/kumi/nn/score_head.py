"""The score head of a reward model: one number per token, computed from its final hidden state.

Scores are in float32 or wider whatever the dtype of the hidden states is, because a preference depends on the
difference of two scores: near 8, neighbouring bfloat16 numbers are 0.06 apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kumi.nn.dtypes import wide
from kumi.spec.ledger import SCORE_CHUNK


def reward_scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the scores (T,), float32 or wider, of the final hidden states (T, D), given the head `weight` (1, D)."""
    scores: Tensor = _Scores.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return scores


class _Scores(torch.autograd.Function):
    """A product with one column, which keeps the hidden states in their own dtype for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        column = weight.to(wide(hidden.dtype)).T
        return torch.cat([torch.mm(hidden[part].to(column.dtype), column) for part in _chunks(hidden)]).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad, row = grad[:, None], weight.to(grad.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_row = torch.zeros_like(row) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden):
            if grad_hidden is not None:
                grad_hidden[part] = torch.mm(grad[part], row)
            if grad_row is not None:
                grad_row.addmm_(grad[part].T, hidden[part].to(row.dtype))
        return grad_hidden, None if grad_row is None else grad_row.to(weight.dtype)


def _chunks(hidden: Tensor) -> Iterator[slice]:
    """Yield slices of consecutive tokens of `hidden` (T, D), at least one."""
    size = max(1, SCORE_CHUNK // hidden.shape[1])
    yield from (slice(first, first + size) for first in range(0, max(1, len(hidden)), size))
