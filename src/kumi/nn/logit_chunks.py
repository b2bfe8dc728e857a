"""One chunk of logits (C, V): the log-probs of its labels, the statistics of its predictions, and its gradient.

A rank may hold a slice of the vocabulary (`Vocabulary`). From the other ranks, it needs two numbers per token: the
log-sum-exp of their logits, and the logit of the label if another rank has the label. Each statistic needs one more
number.

With the kernel of `kumi.nn.kernels.loss_kernels`, a chunk has only one large buffer: its matrix product, which the
gradient overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kumi.accelerator import can
from kumi.nn.dtypes import wide
from kumi.nn.numerics import kernel
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

    def first(self, count: int) -> ChunkBuffers:
        """Return the buffers of the first `count` tokens."""
        return ChunkBuffers(*(buffer[:count] for buffer in self))


class KernelBuffers(NamedTuple):
    """The buffer for one chunk of logits that a kernel computes: the matrix product.

    `numbers` (4, C), float32: those of `loss_kernels.score_rows`.
    `loss`: the module with the kernels.
    """

    product: Tensor
    numbers: Tensor
    loss: ModuleType

    def first(self, count: int) -> KernelBuffers:
        """Return the buffers of the first `count` tokens."""
        return KernelBuffers(self.product[:count], self.numbers[:, :count], self.loss)


def chunk_tokens(hidden: Tensor, weight: Tensor, device_kind: str | None = None) -> int:
    """Return the most tokens of `hidden` (T, D) in a chunk, for the head's `weight` (V, D).

    `device_kind` decides the size; None for the kind of the tensors' device.
    """
    size = logit_chunk(weight.shape[0], device_kind or hidden.device.type)
    if _loss_kernels(hidden) is None:
        return size
    # Without logits and probabilities in float32, more tokens fit into the same memory.
    return size * (4 if hidden.element_size() == 2 else 2)


def _loss_kernels(hidden: Tensor) -> ModuleType | None:
    return None if hidden.dtype == torch.float64 else kernel("loss")


def chunks(
    hidden: Tensor, weight: Tensor, trained: Tensor | None, device_kind: str | None = None
) -> Iterator[tuple[slice | Tensor, ChunkBuffers | KernelBuffers]]:
    """Yield the tokens of each chunk of `hidden` (T, D), with buffers for its logits.

    The tokens are given as an index of `hidden`: a slice, or a part of the positions `trained` (T',) if these are not
    None. `device_kind` is that of `chunk_tokens`.
    """
    tokens = len(hidden) if trained is None else len(trained)
    loss = _loss_kernels(hidden)
    size = min(chunk_tokens(hidden, weight, device_kind), tokens)
    product = hidden.new_empty(size, weight.shape[0])
    buffers: ChunkBuffers | KernelBuffers
    if loss is None:
        # Float32 logits are the product itself. A conversion would read memory that nothing has written.
        same = product.dtype == wide(hidden.dtype)
        logits = product if same else torch.empty_like(product, dtype=wide(hidden.dtype))
        buffers = ChunkBuffers(product, logits, torch.empty_like(logits))
    else:
        buffers = KernelBuffers(product, product.new_empty(4, size, dtype=torch.float32), loss)
    for start in range(0, tokens, size or 1):
        part = slice(start, min(start + size, tokens))
        yield part if trained is None else trained[part], buffers.first(part.stop - start)


def chunk_scores(
    buffers: ChunkBuffers | KernelBuffers,
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    statistics: tuple[Statistic, ...] = (),
) -> TokenScores:
    """Return the scores (C,) of `labels`. Leave in `buffers` what `chunk_gradient` needs.

    log p_y = l_y - l_max - r, with r = log(sum exp(l - l_max)): the largest logit gives the log-sum-exp most
    accurately.
    """
    vocabulary = head.vocabulary
    rows, is_local = vocabulary.rows(labels)
    with_entropy = "entropy" in statistics
    if isinstance(buffers, KernelBuffers):
        largest, rest, label_logit, entropy = _kernel_numbers(buffers, hidden, head, rows, is_local, with_entropy)
    else:
        largest, rest, label_logit, entropy = _plain_numbers(buffers, hidden, head, rows, with_entropy)
    if is_local is None:
        log_prob = label_logit - largest - rest
        top = label_logit == largest if "top" in statistics else None
    else:
        log_sum = largest + rest
        numbers = [
            log_sum,
            label_logit.masked_fill(~is_local, 0.0),
            *([] if entropy is None else [entropy]),
            *([largest] if "top" in statistics else []),
        ]
        log_sums, label_logits, *others = vocabulary.join(torch.stack(numbers)).unbind(1)
        full_log_sum, label_logit = torch.logsumexp(log_sums, dim=0), label_logits.sum(0)
        if isinstance(buffers, KernelBuffers):
            buffers.numbers[1] = full_log_sum - largest
        else:
            buffers.probs.mul_((log_sum - full_log_sum).exp_()[:, None])
        log_prob = label_logit - full_log_sum
        if entropy is not None:
            # The entropy of the choice of a slice, and the mean of the entropies within the slices.
            log_shares = log_sums - full_log_sum
            entropy = (log_shares.exp() * (others[0] - log_shares)).sum(0)
        top = label_logit == others[-1].amax(0) if "top" in statistics else None
    scores = TokenScores(log_prob, entropy, top)
    for values in scores:
        if values is not None:
            values.masked_fill_(labels == IGNORED, 0)
    return scores


# The largest logit, r of `chunk_scores`, the label's logit, and the entropy if it is asked for, of each token (C,).
_Numbers = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _plain_numbers(buffers: ChunkBuffers, hidden: Tensor, head: Head, rows: Tensor, with_entropy: bool) -> _Numbers:
    """Return the numbers of each token, and leave logits and probabilities in `buffers`.

    The entropy is -log p_max - sum p (l - l_max). Without a softcap the gradient needs no logits, so the computation of
    the entropy overwrites them.
    """
    padding = _logits(buffers, hidden, head)
    largest = buffers.logits.amax(dim=-1)
    label_logit = buffers.logits.gather(-1, rows[:, None])[:, 0]
    torch.softmax(buffers.logits, dim=-1, out=buffers.probs)
    log_largest_prob = buffers.probs.amax(dim=-1).log()
    in_place = head.shaping.softcap is None
    entropy = _entropy(buffers, largest, log_largest_prob, padding, in_place=in_place) if with_entropy else None
    return largest, -log_largest_prob, label_logit, entropy


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
    columns = slice(None, -padding or None)  # without the padding, whose logits are -inf
    logits, probs = buffers.logits[:, columns], buffers.probs[:, columns]
    below = logits.sub_(largest[:, None]) if in_place else logits - largest[:, None]
    # Rounding may make the entropy of a sure prediction negative.
    return below.mul_(probs).sum(-1).add_(log_largest_prob).neg_().clamp_(min=0)


def _kernel_numbers(
    buffers: KernelBuffers, hidden: Tensor, head: Head, rows: Tensor, is_local: Tensor | None, with_entropy: bool
) -> _Numbers:
    """Return the numbers of each token by the kernel, and leave the product and the numbers in `buffers`."""
    torch.mm(hidden, head.weight.T, out=buffers.product)
    buffers.loss.scores_(*_kernel_arguments(buffers, head, rows, is_local), with_entropy)
    largest, rest, label_logit, entropy = buffers.numbers.unbind()
    return largest, rest, label_logit, entropy if with_entropy else None


def _kernel_arguments(
    buffers: KernelBuffers, head: Head, rows: Tensor, is_local: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, int, float, float]:
    """Return the arguments that both kernels take. A label of another rank has the row -1."""
    columns = buffers.product.shape[1] - head.vocabulary.padding(head.weight)
    local_rows = rows if is_local is None else rows.masked_fill(~is_local, -1)
    return buffers.product, local_rows, buffers.numbers, columns, head.shaping.scale, head.shaping.softcap or 0.0


def chunk_gradient(
    buffers: ChunkBuffers | KernelBuffers,
    grad_weight: Tensor | None,
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    scale: Tensor,
) -> Tensor:
    """Return the chunk's gradient of sum(scale * log_prob) with respect to `hidden`; add that of the head's weight to
    `grad_weight`.

    `buffers` holds the results of `chunk_scores` and is overwritten. `scale` (C,) multiplies vectors of D elements,
    because multiplying those of V elements would cost more.
    """
    scale = scale.to(wide(hidden.dtype)).masked_fill(labels == IGNORED, 0.0).mul_(-head.shaping.scale)[:, None]
    rows, is_local = head.vocabulary.rows(labels)
    if isinstance(buffers, KernelBuffers):
        buffers.loss.errors_(*_kernel_arguments(buffers, head, rows, is_local))
        if grad_weight is not None:
            add_product(grad_weight, buffers.product.T, (hidden * scale).to(hidden.dtype))
        return torch.mm(buffers.product, head.weight) * scale
    _to_errors(buffers, head.shaping.softcap, rows, is_local)
    if buffers.probs.dtype == hidden.dtype:
        if grad_weight is not None:
            grad_weight.addmm_(buffers.probs.T, hidden * scale)
        return torch.mm(buffers.probs, head.weight) * scale
    error = buffers.product.copy_(buffers.probs)
    if grad_weight is not None:
        add_product(grad_weight, error.T, (hidden * scale).to(hidden.dtype))
    return torch.mm(error, head.weight) * scale


def _to_errors(buffers: ChunkBuffers, softcap: float | None, rows: Tensor, is_local: Tensor | None) -> None:
    """Turn the probabilities in `buffers` into (softmax - onehot(label)) times the derivative of the cap."""
    probs = buffers.probs
    hit = probs.new_full(rows.shape, -1.0) if is_local is None else -is_local.to(probs.dtype)
    probs.scatter_add_(-1, rows[:, None], hit[:, None])
    if softcap is not None:
        # The derivative of the cap, 1 - tanh^2. Padding rows have logits of -inf; clamp their derivative to 0.
        slope = buffers.logits.div_(softcap).square_().neg_().add_(1).clamp_(min=0)
        probs.mul_(slope)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, in float32 or wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif can(total.device, "float32 results of 16-bit products"):
        # cuBLAS adds to float32 in place, without a product in memory. On CPUs, PyTorch has no such operator.
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += torch.mm(left, right)
