"""One chunk of logits (C, V): the log-probs of its labels, the statistics of its predictions, and its gradient.

A rank may hold a slice of the vocabulary (`Vocabulary`). From the other ranks, it needs two numbers per token: the
log-sum-exp of their logits, and the logit of the label if another rank has the label. Each statistic is one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kumi.nn.dtypes import wide
from kumi.objectives import IGNORED
from kumi.spec.ledger import logit_chunk

Statistic = Literal["entropy", "top"]


class TokenScores(NamedTuple):
    """Numbers of each label, of the shape of the labels. Those of ignored labels are 0 or False.

    `log_probs`: float32, or float64 for hidden states of float64.
    `entropy`: of the prediction over the vocabulary, in nats, in the dtype of `log_probs`; None unless asked for.
    `top`: True if no token is more probable than the label; None unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    top: Tensor | None = None

    def view(self, shape: torch.Size) -> TokenScores:
        """Return the same numbers in another shape."""
        entropy, top = (None if numbers is None else numbers.view(shape) for numbers in self[1:])
        return TokenScores(self.log_probs.view(shape), entropy, top)


class Vocabulary:
    """The slice of the vocabulary on this device: here, all of it. `kumi.parallel.vocab_parallel` shards it.

    `first`: the token id of the slice's first row.
    """

    first: int = 0

    def padding(self, weight: Tensor) -> int:
        """Return the number of padding rows at the end of the head's `weight`."""
        return 0

    def rows(self, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the local row of each label, and a mask of the labels that are on this rank; None if all are.

        The row of a label on another rank has no meaning.
        """
        return labels.clamp(min=0), None

    def join(self, numbers: Tensor) -> Tensor:
        """Return the `numbers` (N, C) of all slices of the vocabulary, as (slices, N, C)."""
        return numbers[None]

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

    def at(self, temperature: float) -> Shaping:
        """Return the shaping of logits that are divided by `temperature`. There must be no softcap."""
        assert self.softcap is None, "a capped logit is not a multiple of the product"
        return self._replace(scale=self.scale / temperature)

    def shape_(self, products: Tensor) -> None:
        """Turn `products` into logits in place."""
        if self.scale != 1.0:
            products.mul_(self.scale)
        if self.softcap is not None:
            products.div_(self.softcap).tanh_().mul_(self.softcap)


NO_SHAPING = Shaping()


class Head(NamedTuple):
    """The map from hidden states to logits. `weight` (V, D) has the dtype of the hidden states."""

    weight: Tensor
    vocabulary: Vocabulary
    shaping: Shaping


class ChunkBuffers(NamedTuple):
    """Buffers for one chunk of logits: the matrix product, the logits in float32 or wider, and the probabilities.

    They are reused for every chunk: allocating memory of this size costs more than the computation in it.
    """

    product: Tensor
    logits: Tensor
    probs: Tensor


def chunks(
    hidden: Tensor, weight: Tensor, trained: Tensor | None, device_kind: str | None = None
) -> Iterator[tuple[slice | Tensor, ChunkBuffers]]:
    """Yield the tokens of each chunk of `hidden` (T, D), with buffers for its logits.

    The tokens are an index of `hidden`: a slice, or a part of the positions `trained` (T',) if these are given.
    """
    tokens = len(hidden) if trained is None else len(trained)
    size = min(logit_chunk(weight.shape[0], device_kind or hidden.device.type), tokens)
    product = hidden.new_empty(size, weight.shape[0])
    logits = product.to(wide(hidden.dtype))
    buffers = ChunkBuffers(product, logits, torch.empty_like(logits))
    for start in range(0, tokens, size or 1):
        part = slice(start, min(start + size, tokens))
        used = ChunkBuffers(*(buffer[: part.stop - start] for buffer in buffers))
        yield part if trained is None else trained[part], used


def only_chunk(hidden: Tensor, trained: Tensor | None, probs: Tensor) -> list[tuple[slice | Tensor, ChunkBuffers]]:
    """Return what `chunks` yields for a single chunk whose probabilities `probs` (T, V) are there.

    There are no logits, so `chunk_gradient` of a softcap cannot use it.
    """
    product = probs if probs.dtype == hidden.dtype else torch.empty_like(probs, dtype=hidden.dtype)
    return [(slice(None) if trained is None else trained, ChunkBuffers(product, probs, probs))]


def chunk_scores(
    buffers: ChunkBuffers, hidden: Tensor, head: Head, labels: Tensor, statistics: tuple[Statistic, ...] = ()
) -> TokenScores:
    """Return the scores (C,) of `labels`. Leave logits and probabilities in `buffers`.

    log p_y = l_y - (l_max - log p_max): the largest logit gives the log-sum-exp most accurately. The entropy is
    -log p_max - sum p (l - l_max), from the same two numbers. Without a softcap it takes the place of the logits, which
    the gradient does not need.
    """
    _, vocabulary, shaping = head
    padding = _logits(buffers, hidden, head)
    rows, is_local = vocabulary.rows(labels)
    largest = buffers.logits.amax(dim=-1)
    chosen = buffers.logits.gather(-1, rows[:, None])[:, 0]
    torch.softmax(buffers.logits, dim=-1, out=buffers.probs)
    log_largest_prob = buffers.probs.amax(dim=-1).log()
    entropy, top = None, None
    if "entropy" in statistics:
        entropy = _entropy(buffers, largest, log_largest_prob, padding, in_place=shaping.softcap is None)
    if is_local is None:
        log_prob = chosen - largest + log_largest_prob
        top = chosen == largest if "top" in statistics else None
    else:
        log_sum = largest - log_largest_prob
        chosen.masked_fill_(~is_local, 0.0)
        numbers = [
            log_sum,
            chosen,
            *([] if entropy is None else [entropy]),
            *([largest] if "top" in statistics else []),
        ]
        log_sums, all_chosen, *others = vocabulary.join(torch.stack(numbers)).unbind(1)
        full_log_sum, chosen = torch.logsumexp(log_sums, dim=0), all_chosen.sum(0)
        buffers.probs.mul_((log_sum - full_log_sum).exp_()[:, None])
        log_prob = chosen - full_log_sum
        if entropy is not None:
            # The entropy of the choice of a slice, and the mean of the entropies within the slices.
            log_shares = log_sums - full_log_sum
            entropy = (log_shares.exp() * (others[0] - log_shares)).sum(0)
        top = chosen == others[-1].amax(0) if "top" in statistics else None
    scores = TokenScores(log_prob, entropy, top)
    for values in scores:
        if values is not None:
            values.masked_fill_(labels == IGNORED, 0)
    return scores


def _logits(buffers: ChunkBuffers, hidden: Tensor, head: Head) -> int:
    """Compute the logits of `hidden` (C, D) in `buffers`, -inf in padding columns; return the number of these."""
    torch.mm(hidden, head.weight.T, out=buffers.product)
    if buffers.logits.dtype != buffers.product.dtype:
        buffers.logits.copy_(buffers.product)
    head.shaping.shape_(buffers.logits)
    padding = head.vocabulary.padding(head.weight)
    if padding:
        buffers.logits[:, -padding:] = -torch.inf
    return padding


def _entropy(
    buffers: ChunkBuffers, largest: Tensor, log_largest_prob: Tensor, padding: int, *, in_place: bool
) -> Tensor:
    """Return the entropy (C,) of the probabilities in `buffers`, in nats; if `in_place`, overwrite the logits."""
    columns = slice(None, -padding or None)
    logits, probs = buffers.logits[:, columns], buffers.probs[:, columns]
    below = logits.sub_(largest[:, None]) if in_place else logits - largest[:, None]
    # Rounding may make the entropy of a sure prediction negative.
    return below.mul_(probs).sum(-1).add_(log_largest_prob).neg_().clamp_(min=0)


def chunk_gradient(
    buffers: ChunkBuffers, grad_weight: Tensor | None, hidden: Tensor, head: Head, labels: Tensor, scale: Tensor
) -> Tensor:
    """Return the chunk's gradient of sum(scale * log_prob) with respect to `hidden`; add that of the head's weight to
    `grad_weight`.

    `buffers` holds the results of `chunk_scores` and is overwritten. `scale` multiplies vectors of D elements, because
    vectors of V elements would cost more.
    """
    weight, vocabulary, shaping = head
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
