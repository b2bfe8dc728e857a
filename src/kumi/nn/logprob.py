"""Log-probabilities of labels from hidden states, a chunk of tokens at a time: the full logits are never held.

    log_probs(h, W, labels)            (T,) differentiable; the backward pass computes each chunk's logits again
    weighted_sum(h, W, labels, w)      sum of w * log_probs, and the log-probs; the gradient is formed in the forward
                                       pass, where the logits are at hand, and only scaled in the backward pass

With d(log p_y)/d(logits) = onehot(y) - softmax(logits), both need one chunk (C, V) of logits at a time. Logits may be
what `Shaping` makes of the matrix product.

A rank may have some rows of the vocabulary only (`Vocabulary`): what it needs of the others is one number a token, the
log of their exponentials' sum, and the logit of the label.
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
    """The rows of the head that this device has: all of them. `kumi.parallel.vocab` has those that are dealt out."""

    def padding(self, weight: Tensor) -> int:
        """How many of the last rows of the head's `weight` stand for no token."""
        return 0

    def rows(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """The row of each of `labels` here, any row where it is elsewhere, and which are here; None: all."""
        return labels.clamp(min=0), None

    def join(self, log_sum: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The log-sum-exp of all logits, given that of those here, and the labels' logits, 0 where elsewhere."""
        return log_sum, chosen

    def gather(self, hidden: Tensor) -> Tensor:
        """The final hidden states of all tokens (T, D), given those that are here."""
        return hidden

    def reduce(self, grad_hidden: Tensor) -> Tensor:
        """The gradient of the hidden states that are here, given what this device's rows add to that of all (T, D)."""
        return grad_hidden


WHOLE = Vocabulary()


class Shaping(NamedTuple):
    """What makes logits of the head's products: they are multiplied by `scale`, and then, where there is a `softcap`,
    become softcap * tanh(product / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def shape(self, products: Tensor) -> Tensor:
        """Logits, given what the matrix product gave."""
        if self.scale != 1.0:
            products = products * self.scale
        return products if self.softcap is None else (products / self.softcap).tanh() * self.softcap

    def shape_(self, products: Tensor) -> None:
        """Makes logits of `products` in their place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)


AS_THEY_ARE = Shaping()


def log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: Vocabulary = WHOLE, shaping: Shaping = AS_THEY_ARE
) -> Tensor:
    """Float32 log-probability (T,) of each of `labels` (T,) given `hidden` (T, D) and the head `weight` (V, D).

    Positions labelled -100 give 0 and no gradient.
    """
    result: Tensor = _LogProbs.apply(hidden, weight, labels, vocabulary, shaping)  # type: ignore[no-untyped-call]
    return result


def weighted_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    vocabulary: Vocabulary = WHOLE,
    device_kind: str | None = None,
    shaping: Shaping = AS_THEY_ARE,
) -> tuple[Tensor, Tensor]:
    """sum_t token_weights_t * log_prob_t as a float32 scalar, and the log-probs (T,), detached.

    Chunks are those of a device of `device_kind`, by default the one that the tensors are on.
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
        for part, room in _chunks(hidden, _room(hidden, weight)):
            log_prob[part] = _log_prob(room, hidden[part], cast, labels[part], vocabulary, shaping)
        return log_prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        hidden, head = ctx.vocabulary.gather(hidden), (ctx.vocabulary, ctx.shaping)
        grad_hidden, grad_weight = _gradients(hidden, weight)
        cast = weight.to(hidden.dtype)
        for part, room in _chunks(hidden, _room(hidden, weight)):
            y = labels[part]
            _log_prob(room, hidden[part], cast, y, *head)
            grad_hidden[part] = _backward(room, grad_weight, hidden[part], cast, y, grad[part], *head)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return ctx.vocabulary.reduce(grad_hidden), of_weight, None, None, None


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
        gradients = _gradients(hidden, weight) if needs_grad else None
        # Of size 1 at most, so that gradients keep float16's range; the rest is multiplied on when they are used.
        peak = token_weights.abs().amax().clamp(min=torch.finfo(token_weights.dtype).tiny)
        relative = token_weights / peak
        cast = weight.to(hidden.dtype)
        for part, room in _chunks(hidden, _room(hidden, weight, device_kind)):
            h, y = hidden[part], labels[part]
            log_prob[part] = _log_prob(room, h, cast, y, vocabulary, shaping)
            if gradients is not None:
                gradients[0][part] = _backward(room, gradients[1], h, cast, y, relative[part], vocabulary, shaping)
        if gradients is not None:
            of_weight = None if gradients[1] is None else gradients[1].to(weight.dtype)
            ctx.save_for_backward(vocabulary.reduce(gradients[0]), of_weight, peak)
        ctx.mark_non_differentiable(log_prob)
        return (log_prob * token_weights).sum(), log_prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, peak = ctx.saved_tensors
        factor = grad * peak
        of_weight = None if grad_weight is None else grad_weight * factor
        return (grad_hidden * factor.to(grad_hidden.dtype), of_weight, *[None] * 6)


class _Room(NamedTuple):
    """Memory for one chunk of logits as the matrix product gives them, in float32 or wider, and as probabilities.

    Used again for every chunk: fresh memory of this size costs more than what is computed in it.
    """

    product: Tensor
    logits: Tensor
    probs: Tensor


def _room(hidden: Tensor, weight: Tensor, device_kind: str | None = None) -> _Room:
    tokens = min(logit_chunk(weight.shape[0], device_kind or hidden.device.type), len(hidden))
    product = hidden.new_empty(tokens, weight.shape[0])
    logits = product.to(wide(hidden.dtype))
    return _Room(product, logits, torch.empty_like(logits))


def _chunks(hidden: Tensor, room: _Room) -> Iterator[tuple[slice, _Room]]:
    """Consecutive tokens, and as much of `room` as they need."""
    size = len(room.product)
    for start in range(0, len(hidden), size):
        stop = min(start + size, len(hidden))
        yield slice(start, stop), _Room(*(tensor[: stop - start] for tensor in room))


def _gradients(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Room for the gradients of `hidden` and, where chunks add up, in float32 or wider, of `weight` if that is
    trained."""
    of_weight = torch.zeros_like(weight, dtype=wide(hidden.dtype)) if weight.requires_grad else None
    return torch.empty_like(hidden), of_weight


def _log_prob(
    room: _Room, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: Vocabulary, shaping: Shaping
) -> Tensor:
    """Log-probs (C,) of `labels`, 0 where ignored; leaves the logits and probabilities of all tokens in `room`.

    log p_y = l_y - (l_max - log p_max): of all logits the largest gives the log-sum-exp most accurately.
    """
    torch.mm(hidden, weight.T, out=room.product)
    if room.logits.dtype != room.product.dtype:
        room.logits.copy_(room.product)
    shaping.shape_(room.logits)
    padding = vocabulary.padding(weight)
    if padding:
        room.logits[:, -padding:] = -torch.inf
    rows, here = vocabulary.rows(labels)
    largest = room.logits.amax(dim=-1)
    chosen = room.logits.gather(-1, rows[:, None])[:, 0]
    torch.softmax(room.logits, dim=-1, out=room.probs)
    if here is None:
        log_prob = chosen - largest + room.probs.amax(dim=-1).log()
    else:
        log_sum = largest - room.probs.amax(dim=-1).log()
        every, chosen = vocabulary.join(log_sum, chosen.masked_fill_(~here, 0.0))
        room.probs.mul_((log_sum - every).exp_()[:, None])
        log_prob = chosen - every
    return log_prob.masked_fill_(labels == IGNORED, 0.0)


def _backward(
    room: _Room,
    grad_weight: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    vocabulary: Vocabulary,
    shaping: Shaping,
) -> Tensor:
    """The chunk's gradient of sum(scale * log_prob) with respect to `hidden`; adds that of `weight` to `grad_weight`,
    where there is one.

    `scale` multiplies rows of D elements, not of V. What `_log_prob` left in `room` is overwritten.
    """
    scale = scale.to(room.probs.dtype).masked_fill(labels == IGNORED, 0.0).mul_(-shaping.scale)[:, None]
    rows, here = vocabulary.rows(labels)
    hit = torch.full_like(scale, -1.0) if here is None else -here[:, None].to(scale.dtype)
    room.probs.scatter_add_(-1, rows[:, None], hit)
    if shaping.softcap is not None:
        # The slope of the cap: 1 - tanh^2. A row that stands for no token has none, its logit being -inf.
        slope = room.logits.div_(shaping.softcap).square_().neg_().add_(1).clamp_(min=0)
        room.probs.mul_(slope)
    if room.probs.dtype == hidden.dtype:
        if grad_weight is not None:
            grad_weight.addmm_(room.probs.T, hidden * scale)
        return torch.mm(room.probs, weight) * scale
    error = room.product.copy_(room.probs)
    if grad_weight is not None:
        grad_weight += torch.mm(error.T, (hidden * scale).to(hidden.dtype))
    return torch.mm(error, weight) * scale
