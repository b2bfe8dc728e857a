"""Log-probabilities of labels from hidden states, in chunks of tokens, so that the full logits are never in memory.

    log_probs(h, W, labels)            (T,) differentiable; the backward pass recomputes each chunk's logits, unless a
                                       CPU keeps the only chunk (see `kumi.spec.loss_passes.keeps_chunk`)
    weighted_sum(h, W, labels, w)      sum of w * log_probs, and the log-probs; the forward pass computes the gradient
                                       from the logits of each chunk, and the backward pass only scales it

With d(log p_y)/d(logits) = onehot(y) - softmax(logits), both need one chunk (C, V) of logits at a time (see
`kumi.nn.logit_chunks`). If the positions of the trained labels are given, only their tokens are in chunks: the others
cost neither matmuls nor memory for logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kumi.nn.dtypes import wide
from kumi.nn.logit_chunks import (
    FULL_VOCABULARY,
    NO_SHAPING,
    Head,
    Shaping,
    Statistic,
    TokenScores,
    Vocabulary,
    chunk_gradient,
    chunk_scores,
    chunk_tokens,
    chunks,
)
from kumi.spec.loss_passes import keeps_chunk


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: Vocabulary = FULL_VOCABULARY,
    device_kind: str | None = None,
    shaping: Shaping = NO_SHAPING,
    trained: Tensor | None = None,
    statistics: tuple[Statistic, ...] = (),
    *,
    pipelined: bool = False,
) -> TokenScores:
    """Return the log-probability (T,) of each label, given `hidden` (T, D) and the head `weight` (V, D).

    A label of -100, or one that is not `trained`, gives 0 and no gradient.

    `trained` (T',): positions of labels, int64; None for all. The head is computed at these positions only. All ranks
    of a sharded vocabulary must give the same positions. `device_kind` is that of `weighted_sum`.
    `statistics`: further numbers of each label to compute from the same logits, without a gradient.
    `pipelined`: other microbatches may be computed before the backward pass, so no chunk stays in memory until then.
    """
    options = (vocabulary, device_kind, shaping, trained, statistics, pipelined)
    return TokenScores(*_LogProbs.apply(hidden, weight, labels, *options))  # type: ignore[no-untyped-call]


def weighted_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    vocabulary: Vocabulary = FULL_VOCABULARY,
    device_kind: str | None = None,
    shaping: Shaping = NO_SHAPING,
    trained: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sum_t token_weights_t * log_prob_t as a float32 scalar, and the log-probs (T,), detached.

    `device_kind` sets the chunk size; by default it is the type of the tensors' device. `trained` is that of
    `log_probs`.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    options = (token_weights, vocabulary, needs_grad, device_kind, shaping, trained)
    total, detached = _WeightedSum.apply(hidden, weight, labels, *options)  # type: ignore[no-untyped-call]
    return total, detached


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: Vocabulary,
        device_kind: str | None,
        shaping: Shaping,
        trained: Tensor | None,
        statistics: tuple[Statistic, ...],
        pipelined: bool,
    ) -> TokenScores:
        ctx.save_for_backward(hidden, weight, labels, trained)
        ctx.vocabulary, ctx.device_kind, ctx.shaping, ctx.chunk = vocabulary, device_kind, shaping, None
        hidden = vocabulary.gather(hidden)
        scores = _score_buffers(hidden, statistics)
        head = Head(weight.to(hidden.dtype), vocabulary, shaping)
        tokens, most = len(hidden) if trained is None else len(trained), chunk_tokens(hidden, weight, device_kind)
        keeps = keeps_chunk(tokens, most, device_kind or hidden.device.type, pipelined=pipelined)
        for part, buffers in chunks(hidden, weight, trained, device_kind):
            _write(scores, part, chunk_scores(buffers, hidden[part], head, labels[part], statistics))
            if keeps:
                ctx.chunk = part, buffers
        ctx.mark_non_differentiable(*_present(scores[1:]))
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, trained = ctx.saved_tensors
        hidden = ctx.vocabulary.gather(hidden)
        head = Head(weight.to(hidden.dtype), ctx.vocabulary, ctx.shaping)
        grad_hidden, grad_weight = _gradient_buffers(hidden, weight, trained)
        # The gradient overwrites the chunk: a second backward pass computes it again.
        chunk, ctx.chunk = ctx.chunk, None
        for part, buffers in chunks(hidden, weight, trained, ctx.device_kind) if chunk is None else [chunk]:
            h, y = hidden[part], labels[part]
            if chunk is None:
                chunk_scores(buffers, h, head, y)
            _put_rows(grad_hidden, part, chunk_gradient(buffers, grad_weight, h, head, y, grad[part]))
        cast_grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return (ctx.vocabulary.reduce(grad_hidden), cast_grad_weight, *[None] * 7)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        vocabulary: Vocabulary,
        needs_grad: bool,
        device_kind: str | None,
        shaping: Shaping,
        trained: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        hidden = vocabulary.gather(hidden)
        log_prob = hidden.new_zeros(len(hidden), dtype=wide(hidden.dtype))
        gradients = _gradient_buffers(hidden, weight, trained) if needs_grad else None
        token_weights = token_weights.to(log_prob.dtype)
        # Use weights of at most 1 so that gradients stay in float16's range. The backward pass multiplies by `peak`.
        peak = token_weights.abs().amax().clamp(min=torch.finfo(token_weights.dtype).tiny)
        relative = token_weights / peak
        head = Head(weight.to(hidden.dtype), vocabulary, shaping)
        for part, buffers in chunks(hidden, weight, trained, device_kind):
            h, y = hidden[part], labels[part]
            log_prob[part] = chunk_scores(buffers, h, head, y).log_probs
            if gradients is not None:
                _put_rows(gradients[0], part, chunk_gradient(buffers, gradients[1], h, head, y, relative[part]))
        if gradients is not None:
            cast_grad_weight = None if gradients[1] is None else gradients[1].to(weight.dtype)
            ctx.save_for_backward(vocabulary.reduce(gradients[0]), cast_grad_weight, peak)
        ctx.mark_non_differentiable(log_prob)
        return (log_prob * token_weights).sum(), log_prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, peak = ctx.saved_tensors
        factor = grad * peak
        scaled_grad_weight = None if grad_weight is None else grad_weight * factor
        return (grad_hidden * factor.to(grad_hidden.dtype), scaled_grad_weight, *[None] * 7)


def _score_buffers(hidden: Tensor, statistics: tuple[Statistic, ...]) -> TokenScores:
    """Return scores of 0 and False for the tokens of `hidden` (T, D), with the `statistics` that are asked for."""
    zeros = hidden.new_zeros(len(hidden), dtype=wide(hidden.dtype))
    entropy = torch.zeros_like(zeros) if "entropy" in statistics else None
    return TokenScores(zeros, entropy, zeros.bool() if "top" in statistics else None)


def _write(scores: TokenScores, part: slice | Tensor, chunk: TokenScores) -> None:
    for buffer, values in zip(_present(scores), _present(chunk), strict=True):
        buffer[part] = values


def _put_rows(buffer: Tensor, part: slice | Tensor, rows: Tensor) -> None:
    """Write `rows` to `buffer[part]`, in its dtype. A variable in the caller's loop would keep `rows` in memory during
    the next chunk."""
    buffer[part] = rows.to(buffer.dtype)


def _present(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _gradient_buffers(hidden: Tensor, weight: Tensor, trained: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return buffers for the gradient of `hidden`, and of `weight` if it is trained.

    The buffer of `hidden` is zeroed if only `trained` tokens are in chunks; else it is empty, and chunks write all of
    it. The gradient of `weight` is summed over chunks, in float32 or wider.
    """
    grad_weight = torch.zeros_like(weight, dtype=wide(hidden.dtype)) if weight.requires_grad else None
    return torch.empty_like(hidden) if trained is None else torch.zeros_like(hidden), grad_weight
