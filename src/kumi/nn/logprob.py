"""Log-probabilities of labels from hidden states, a chunk of tokens at a time: the full logits are never held.

    log_probs(h, W, labels)            (T,) differentiable; the backward pass computes each chunk's logits again
    weighted_sum(h, W, labels, w)      sum of w * log_probs, and the log-probs; the gradient is formed in the forward
                                       pass, where the logits are at hand, and only scaled in the backward pass

With d(log p_y)/d(logits) = onehot(y) - softmax(logits), both need one chunk (C, V) of logits at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORE = -100

# Elements of a chunk of logits: large enough for full-speed matrix products, small beside the model.
_CPU_CHUNK, _DEVICE_CHUNK = 2**22, 2**27


def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Float32 log-probability (T,) of each of `labels` (T,) given `hidden` (T, D) and the head `weight` (V, D).

    Positions labelled -100 give 0 and no gradient.
    """
    result: Tensor = _LogProbs.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]
    return result


def weighted_sum(hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum_t token_weights_t * log_prob_t as a float32 scalar, and the log-probs (T,), detached."""
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total, detached = _WeightedSum.apply(hidden, weight, labels, token_weights, needs_grad)  # type: ignore[no-untyped-call]
    return total, detached


def chunk_tokens(vocab_size: int, device: torch.device) -> int:
    """How many tokens' logits are held at a time."""
    return max(128, (_CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK) // vocab_size)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        cast, chunk = weight.to(hidden.dtype), chunk_tokens(weight.shape[0], hidden.device)
        parts = [_statistics(h, cast, y) for h, y in zip(torch.split(hidden, chunk), torch.split(labels, chunk))]
        log_prob = torch.cat([part[0] for part in parts])
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk = chunk
        return log_prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, labels = ctx.saved_tensors
        grad_hidden, grad_weight = _zeros(hidden, weight)
        cast, chunk = weight.to(hidden.dtype), ctx.chunk
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            _, logits, lse = _statistics(hidden[part], cast, labels[part])
            _accumulate(grad_hidden[part], grad_weight, hidden[part], cast, labels[part], logits, lse, grad[part])
        return grad_hidden, grad_weight.to(weight.dtype), None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, needs_grad: bool
    ) -> tuple[Tensor, Tensor]:
        cast, chunk = weight.to(hidden.dtype), chunk_tokens(weight.shape[0], hidden.device)
        grad_hidden, grad_weight = _zeros(hidden, weight) if needs_grad else (None, None)
        log_prob = torch.empty(len(labels), dtype=_wide(hidden.dtype), device=hidden.device)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            h, y = hidden[part], labels[part]
            log_prob[part], logits, lse = _statistics(h, cast, y)
            if grad_hidden is not None and grad_weight is not None:
                _accumulate(grad_hidden[part], grad_weight, h, cast, y, logits, lse, token_weights[part])
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(log_prob)
        return (log_prob * token_weights).sum(), log_prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _zeros(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.zeros_like(weight, dtype=_wide(hidden.dtype))


def _statistics(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs (C,) of `labels`, logits (C, V) and their log-sum-exp (C, 1), in float32 or wider."""
    logits = (hidden @ weight.T).to(_wide(hidden.dtype))
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(-1, labels.clamp(min=0)[:, None])
    return torch.where(labels == IGNORE, 0.0, (chosen - lse)[:, 0]), logits, lse


def _accumulate(
    grad_hidden: Tensor, grad_weight: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, logits: Tensor,
    lse: Tensor, scale: Tensor,
) -> None:  # fmt: skip
    """Write the chunk's gradient of sum(scale * log_prob) into `grad_hidden`, and add it to `grad_weight`."""
    scale = torch.where(labels == IGNORE, 0.0, scale.to(logits.dtype))[:, None]
    grad = logits.sub_(lse).exp_().mul_(-scale)
    grad.scatter_add_(-1, labels.clamp(min=0)[:, None], scale)
    grad = grad.to(hidden.dtype)
    torch.mm(grad, weight, out=grad_hidden)
    grad_weight += grad.T @ hidden
