"""Log-probabilities of labels from hidden states, in chunks of tokens, so that the full logits are never in memory.

    log_probs(h, W, labels)            (T,) differentiable; the backward pass recomputes each chunk's logits
    weighted_sum(h, W, labels, w)      sum of w * log_probs, and the log-probs; the forward pass computes the gradient
                                       from the logits of each chunk, and the backward pass only scales it

With d(log p_y)/d(logits) = onehot(y) - softmax(logits), both need one chunk (C, V) of logits at a time. `Shaping` may
scale and cap the logits.

A rank may hold a slice of the vocabulary (`Vocabulary`). From the other ranks, it needs two numbers per token: the
log-sum-exp of their logits, and the logit of the label if another rank has the label.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kumi.nn.dtypes import wide
from kumi.objectives import IGNORED
from kumi.spec.ledger import logit_chunk


class Vocabulary:
    """The slice of the vocabulary on this device: here, all of it. `kumi.parallel.vocab_parallel` shards it."""

    def padding(self, weight: Tensor) -> int:
        """Return the number of padding rows at the end of the head's `weight`."""
        return 0

    def rows(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the local row of each label, and a mask of the labels that are on this rank; None if all are.

        The row of a label on another rank has no meaning.
        """
        return labels.clamp(min=0), None

    def join(self, log_sum: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp over the full vocabulary and the labels' logits.

        `log_sum` is the local log-sum-exp; `chosen` are the labels' logits, 0 for labels on other ranks.
        """
        return log_sum, chosen

    def gather(self, hidden: Tensor) -> Tensor:
        """Return the final hidden states of all tokens (T, D), given the local ones."""
        return hidden

    def reduce(self, grad_hidden: Tensor) -> Tensor:
        """Return the gradient of the local hidden states, given this rank's contribution for all tokens (T, D)."""
        return grad_hidden


FULL_VOCABULARY = Vocabulary()


class Shaping(NamedTuple):
    """The scale and the softcap that turn the head's product into logits.

    `scale`: factor of the product.
    `softcap`: the scaled product becomes softcap * tanh(product / softcap); None for no cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def shape(self, products: Tensor) -> Tensor:
        """Return the logits for the head's `products`."""
        if self.scale != 1.0:
            products = products * self.scale
        return products if self.softcap is None else (products / self.softcap).tanh() * self.softcap

    def shape_(self, products: Tensor) -> None:
        """Turn `products` into logits in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)


NO_SHAPING = Shaping()


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary: Vocabulary = FULL_VOCABULARY,
    shaping: Shaping = NO_SHAPING,
) -> Tensor:
    """Return the float32 log-probability (T,) of each label, given `hidden` (T, D) and the head `weight` (V, D).

    A label of -100 gives 0 and no gradient.
    """
    result: Tensor = _LogProbs.apply(hidden, weight, labels, vocabulary, shaping)  # type: ignore[no-untyped-call]
    return result


def weighted_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    vocabulary: Vocabulary = FULL_VOCABULARY,
    device_kind: str | None = None,
    shaping: Shaping = NO_SHAPING,
) -> tuple[Tensor, Tensor]:
    """Return sum_t token_weights_t * log_prob_t as a float32 scalar, and the log-probs (T,), detached.

    `device_kind` sets the chunk size; by default it is the type of the tensors' device.
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    options = (token_weights, vocabulary, needs_grad, device_kind, shaping)
    total, detached = _WeightedSum.apply(hidden, weight, labels, *options)  # type: ignore[no-untyped-call]
    return total, detached


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: Vocabulary, shaping: Shaping
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.vocabulary, ctx.shaping = vocabulary, shaping
        hidden = vocabulary.gather(hidden)
        log_prob = hidden.new_empty(len(labels), dtype=wide(hidden.dtype))
        cast = weight.to(hidden.dtype)
        for part, buffers in _chunks(hidden, _chunk_buffers(hidden, weight)):
            log_prob[part] = _log_prob(buffers, hidden[part], cast, labels[part], vocabulary, shaping)
        return log_prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        hidden, head = ctx.vocabulary.gather(hidden), (ctx.vocabulary, ctx.shaping)
        grad_hidden, grad_weight = _gradient_buffers(hidden, weight)
        cast = weight.to(hidden.dtype)
        for part, buffers in _chunks(hidden, _chunk_buffers(hidden, weight)):
            y = labels[part]
            _log_prob(buffers, hidden[part], cast, y, *head)
            grad_hidden[part] = _backward(buffers, grad_weight, hidden[part], cast, y, grad[part], *head)
        cast_grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return ctx.vocabulary.reduce(grad_hidden), cast_grad_weight, None, None, None


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
    ) -> tuple[Tensor, Tensor]:
        hidden = vocabulary.gather(hidden)
        log_prob = hidden.new_empty(len(labels), dtype=wide(hidden.dtype))
        gradients = _gradient_buffers(hidden, weight) if needs_grad else None
        token_weights = token_weights.to(log_prob.dtype)
        # Use weights of at most 1 so that gradients stay in float16's range. The backward pass multiplies by `peak`.
        peak = token_weights.abs().amax().clamp(min=torch.finfo(token_weights.dtype).tiny)
        relative = token_weights / peak
        cast = weight.to(hidden.dtype)
        for part, buffers in _chunks(hidden, _chunk_buffers(hidden, weight, device_kind)):
            h, y = hidden[part], labels[part]
            log_prob[part] = _log_prob(buffers, h, cast, y, vocabulary, shaping)
            if gradients is not None:
                gradients[0][part] = _backward(buffers, gradients[1], h, cast, y, relative[part], vocabulary, shaping)
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
        return (grad_hidden * factor.to(grad_hidden.dtype), scaled_grad_weight, *[None] * 6)


class _ChunkBuffers(NamedTuple):
    """Buffers for one chunk of logits: the matrix product, the logits in float32 or wider, and the probabilities.

    They are reused for every chunk: allocating memory of this size costs more than the computation in it.
    """

    product: Tensor
    logits: Tensor
    probs: Tensor


def _chunk_buffers(hidden: Tensor, weight: Tensor, device_kind: str | None = None) -> _ChunkBuffers:
    tokens = min(logit_chunk(weight.shape[0], device_kind or hidden.device.type), len(hidden))
    product = hidden.new_empty(tokens, weight.shape[0])
    logits = product.to(wide(hidden.dtype))
    return _ChunkBuffers(product, logits, torch.empty_like(logits))


def _chunks(hidden: Tensor, buffers: _ChunkBuffers) -> Iterator[tuple[slice, _ChunkBuffers]]:
    """Yield slices of consecutive tokens, each with the part of `buffers` that it needs."""
    size = len(buffers.product)
    for start in range(0, len(hidden), size):
        stop = min(start + size, len(hidden))
        yield slice(start, stop), _ChunkBuffers(*(tensor[: stop - start] for tensor in buffers))


def _gradient_buffers(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return buffers for the gradient of `hidden`, and of `weight` if it is trained.

    The gradient of `weight` is summed over chunks, in float32 or wider.
    """
    grad_weight = torch.zeros_like(weight, dtype=wide(hidden.dtype)) if weight.requires_grad else None
    return torch.empty_like(hidden), grad_weight


def _log_prob(
    buffers: _ChunkBuffers, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: Vocabulary, shaping: Shaping
) -> Tensor:
    """Return the log-probs (C,) of `labels`, 0 for ignored ones. Leave logits and probabilities in `buffers`.

    log p_y = l_y - (l_max - log p_max): the largest logit gives the log-sum-exp most accurately.
    """
    torch.mm(hidden, weight.T, out=buffers.product)
    if buffers.logits.dtype != buffers.product.dtype:
        buffers.logits.copy_(buffers.product)
    shaping.shape_(buffers.logits)
    padding = vocabulary.padding(weight)
    if padding:
        buffers.logits[:, -padding:] = -torch.inf
    rows, is_local = vocabulary.rows(labels)
    largest = buffers.logits.amax(dim=-1)
    chosen = buffers.logits.gather(-1, rows[:, None])[:, 0]
    torch.softmax(buffers.logits, dim=-1, out=buffers.probs)
    if is_local is None:
        log_prob = chosen - largest + buffers.probs.amax(dim=-1).log()
    else:
        log_sum = largest - buffers.probs.amax(dim=-1).log()
        full_log_sum, chosen = vocabulary.join(log_sum, chosen.masked_fill_(~is_local, 0.0))
        buffers.probs.mul_((log_sum - full_log_sum).exp_()[:, None])
        log_prob = chosen - full_log_sum
    return log_prob.masked_fill_(labels == IGNORED, 0.0)


def _backward(
    buffers: _ChunkBuffers,
    grad_weight: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    vocabulary: Vocabulary,
    shaping: Shaping,
) -> Tensor:
    """Return the chunk's gradient of sum(scale * log_prob) with respect to `hidden`; add that of `weight` to
    `grad_weight`.

    `buffers` holds the results of `_log_prob` and is overwritten. `scale` multiplies vectors of D elements, because
    vectors of V elements would cost more.
    """
    scale = scale.to(buffers.probs.dtype).masked_fill(labels == IGNORED, 0.0).mul_(-shaping.scale)[:, None]
    rows, is_local = vocabulary.rows(labels)
    hit = torch.full_like(scale, -1.0) if is_local is None else -is_local[:, None].to(scale.dtype)
    buffers.probs.scatter_add_(-1, rows[:, None], hit)
    if shaping.softcap is not None:
        # The derivative of the cap, 1 - tanh^2. Padding rows have logits of -inf; clamp their derivative to 0.
        slope = buffers.logits.div_(shaping.softcap).square_().neg_().add_(1).clamp_(min=0)
        buffers.probs.mul_(slope)
    if buffers.probs.dtype == hidden.dtype:
        if grad_weight is not None:
            grad_weight.addmm_(buffers.probs.T, hidden * scale)
        return torch.mm(buffers.probs, weight) * scale
    error = buffers.product.copy_(buffers.probs)
    if grad_weight is not None:
        grad_weight += torch.mm(error.T, (hidden * scale).to(hidden.dtype))
    return torch.mm(error, weight) * scale
