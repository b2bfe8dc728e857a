"""The router of a mixture of experts, and the two ways of balancing the experts' load.

Scores are the softmax or sigmoid of a matrix product in float32 or wider, with a bias if the model has one. Balancing
is off until a trainer enables it: an auxiliary loss, added to the gradient of the scores, or a correction bias that
only affects the choice (loss-free).

The auxiliary loss of a token is X * sum_e f_e p_e. p_e is the token's score of expert e, divided by the sum of the
token's scores. f_e is the load of expert e, counted in one of two ways:

- over the microbatch, as choices per token (f sums to k; Fedus et al., 2021, arXiv:2101.03961, as transformers computes
  it);
- over the token's sequence, as the fraction of all choices (f sums to 1; DeepSeek-AI, 2024, arXiv:2405.04434).

transformers pools the counts and scores of all layers before it multiplies them. Here, as in most trainers, each layer
has its own sum, and the loss is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kumi.nn.dtypes import wide
from kumi.spec import model

# transformers adds this to the sum of the chosen sigmoids before it divides the weights by the sum.
_TINY = 1e-20


def _identity(counts: Tensor) -> Tensor:
    return counts


@dataclass
class Balance:
    """The balancing options of a router and its statistics. The trainer sets the options and reads the statistics.

    `weight`: factor of a token's auxiliary loss: coefficient / (MoE layers * tokens of the step) * loss scale, or 0.
    `per_sequence`: count the load over each sequence instead of over the microbatch.
    `sum_counts(counts)`: sum counts over the ranks that hold parts of the same sequences.
    `part`: index of this rank's part, if ranks split the tokens of the batch (B, S) into consecutive parts of one size.
    `counts` (X,) int64: choices since the last reset.
    `loss`: weighted auxiliary loss since the last reset.

    The statistics are updated in the backward pass, so that recomputation counts no choice twice and evaluation
    counts none.
    """

    weight: float = 0.0
    per_sequence: bool = False
    sum_counts: Callable[[Tensor], Tensor] = _identity
    part: int = 0
    counts: Tensor | None = None
    loss: Tensor | None = None

    def reset(self) -> None:
        """Reset the statistics."""
        self.counts, self.loss = None, None


@dataclass(frozen=True)
class Routing:
    """The experts chosen for T tokens.

    `ids` (T, k): the experts.
    `weights` (T, k): their weights, float32 or wider.
    `counts` (X,) int64: the number of tokens of each expert.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor


class Router(nn.Module):
    """The scores of the experts, and the choice of k of them."""

    def __init__(self, hidden_size: int, spec: model.MoE, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.balance = spec, Balance(per_sequence=spec.seq_aux)
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(spec.num_experts, device=device, dtype=dtype)) if spec.bias else None
        self.e_score_correction_bias: Tensor | None
        bias = torch.empty(spec.num_experts, device=device, dtype=wide(dtype)) if spec.has_correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Routing:
        """Return the routing of tokens `x` (T, D), which are all or a part of a batch of `shape` (B, S)."""
        weights, ids, counts = _Route.apply(x, self.weight, self.bias, self, shape)  # type: ignore[no-untyped-call]
        return Routing(ids, weights, counts)

    @torch.no_grad()
    def update_bias(self, counts: Tensor, rate: float) -> None:
        """Raise the bias of experts with less than the mean load by `rate`, and lower that of the others.

        `counts` (X,) is the load, summed over all ranks (Wang et al., 2024, arXiv:2408.15664).
        """
        assert self.e_score_correction_bias is not None, "this router has no correction bias"
        load = counts.to(self.e_score_correction_bias.dtype)
        self.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=rate)


def routers(module: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield each router below `module`, with its name."""
    yield from ((name, part) for name, part in module.named_modules() if isinstance(part, Router))


def choose_experts(scores: Tensor, bias: Tensor | None, spec: model.MoE) -> Tensor:
    """Return the k experts (T, k) with the best `scores` (T, X), from the best groups if the model has groups."""
    scores = scores if bias is None else scores + bias
    if spec.n_group > 1:
        groups = scores.view(len(scores), spec.n_group, -1)
        group_scores = groups.topk(2, dim=-1).values.sum(dim=-1) if spec.has_correction_bias else groups.amax(dim=-1)
        best_groups = group_scores.topk(spec.topk_group, dim=-1).indices
        excluded = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, False)
        scores = groups.masked_fill(excluded[..., None], -torch.inf).flatten(-2)
    return scores.topk(spec.num_experts_per_tok, dim=-1).indices


def rows_per_expert(ids: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert (X,) occurs in `ids`, without waiting for the device."""
    flat = ids.flatten()
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


class _Route(torch.autograd.Function):
    """The routing as one autograd function, which keeps tokens, scores and choices.

    The backward pass adds the gradient of the auxiliary loss.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, router: Router, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, dtype = router.spec, wide(x.dtype)
        inputs, matrix = x.to(dtype), weight.to(dtype).T
        logits = torch.mm(inputs, matrix) if bias is None else torch.addmm(bias.to(dtype), inputs, matrix)
        scores = logits.softmax(dim=-1) if spec.scoring_func == "softmax" else logits.sigmoid()
        ids = choose_experts(scores, router.e_score_correction_bias, spec)
        weights = scores.gather(1, ids)
        if spec.norm_topk_prob:
            weights /= _weight_sum(weights, spec)
        counts = rows_per_expert(ids, spec.num_experts)
        ctx.save_for_backward(x, weight, scores, ids)
        ctx.router, ctx.shape = router, shape
        ctx.mark_non_differentiable(ids, counts)
        return weights.mul_(spec.routed_scaling_factor), ids, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, scores, ids = ctx.saved_tensors
        spec: model.MoE = ctx.router.spec
        grad_scores = torch.zeros_like(scores).scatter_(1, ids, _grad_chosen(grad, scores.gather(1, ids), spec))
        _add_auxiliary_loss(ctx.router, scores, ids, ctx.shape, grad_scores)
        if spec.scoring_func == "softmax":
            grad_logits = torch._softmax_backward_data(grad_scores, scores, -1, scores.dtype)
        else:
            grad_logits = torch.ops.aten.sigmoid_backward(grad_scores, scores)
        grad_x = torch.mm(grad_logits, weight.to(scores.dtype)).to(x.dtype)
        grad_bias = grad_logits.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, torch.mm(grad_logits.T, x.to(scores.dtype)).to(weight.dtype), grad_bias, None, None


def _weight_sum(chosen: Tensor, spec: model.MoE) -> Tensor:
    total = chosen.sum(dim=-1, keepdim=True)
    return total if spec.scoring_func == "softmax" else total + _TINY


def _grad_chosen(grad: Tensor, chosen: Tensor, spec: model.MoE) -> Tensor:
    """Return the gradient of the chosen scores (T, k), given that of the weights."""
    grad = grad * spec.routed_scaling_factor
    if not spec.norm_topk_prob:
        return grad
    total = _weight_sum(chosen, spec)
    return (grad - (grad * chosen).sum(dim=-1, keepdim=True) / total) / total


def _add_auxiliary_loss(router: Router, scores: Tensor, ids: Tensor, shape: tuple[int, int], grad: Tensor) -> None:
    """Count the choices, and add the gradient of the auxiliary loss with respect to `scores` (T, X) to `grad`."""
    balance, experts = router.balance, router.spec.num_experts
    counts = rows_per_expert(ids, experts)
    balance.counts = counts if balance.counts is None else balance.counts + counts
    if not balance.weight:
        return
    if balance.per_sequence:
        first = 0 if len(ids) == shape[0] * shape[1] else balance.part * len(ids)
        sequence = torch.arange(first, first + len(ids), device=ids.device) // shape[1]
        counts = balance.sum_counts(rows_per_expert(ids + sequence[:, None] * experts, shape[0] * experts))
        counts = counts.view(shape[0], experts).to(scores.dtype)
        loads = (counts / counts.sum(dim=-1, keepdim=True)).index_select(0, sequence)
    else:
        counts = balance.sum_counts(counts).to(scores.dtype)
        loads = counts * (router.spec.num_experts_per_tok / counts.sum())
    total = scores.sum(dim=-1, keepdim=True)
    slope = loads * (balance.weight * experts)
    loss = (scores * slope).sum(dim=-1, keepdim=True) / total
    grad += (slope - loss) / total
    balance.loss = loss.sum() if balance.loss is None else balance.loss + loss.sum()
