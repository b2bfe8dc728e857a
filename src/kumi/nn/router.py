"""Which experts a token goes to, with what weights, and what keeps the experts equally busy.

Scores are softmax or sigmoid of a matrix product in float32 or wider, with a bias where the model has one. Two ways of
balancing, both off until a trainer sets them: an auxiliary loss whose gradient joins that of the scores, and a bias
that only chooses (loss-free).

The auxiliary loss of a token is X * sum_e f_e p_e, where p are its scores divided by their sum and f_e the share of
expert e in what the tokens around it chose: of all tokens of the microbatch, counted against the tokens (f sums to k;
Fedus et al., 2021, arXiv:2101.03961, as transformers computes it), or of the token's sequence, counted against the
choices (f sums to 1; DeepSeek-AI, 2024, arXiv:2405.04434). transformers pools the counts and scores of all layers
before it multiplies them; here, as in most trainers, every layer has its own sum, and the loss is their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kumi.nn.dtypes import wide
from kumi.spec import model

# transformers adds this to a sum of sigmoids that it divides by.
_TINY = 1e-20


def _alone(counts: Tensor) -> Tensor:
    return counts


@dataclass
class Balance:
    """What a router does about balance besides routing, and what it saw; a trainer sets and reads it.

    `weight` is what the auxiliary loss of a token is multiplied by: coefficient / (MoE layers * tokens of the step),
    times the loss scale; 0 for no such loss. `per_sequence` counts in each sequence instead of in the microbatch.
    `sum_counts(counts)` adds up what ranks counted that have parts of the same sequences, all of them equally often;
    `part` is which of equal consecutive parts of the tokens of `Where.shape` this rank has, if it has not all.

    `counts` (X,) int64 are choices and `loss` the weighted auxiliary loss since they were last reset, added up in the
    backward pass: recomputation counts nothing twice, evaluation nothing at all.
    """

    weight: float = 0.0
    per_sequence: bool = False
    sum_counts: Callable[[Tensor], Tensor] = _alone
    part: int = 0
    counts: Tensor | None = None
    loss: Tensor | None = None

    def reset(self) -> None:
        """Forget what was counted."""
        self.counts, self.loss = None, None


@dataclass(frozen=True)
class Routing:
    """Of T tokens: expert numbers `ids` (T, k) and their `weights` (T, k), float32 or wider; `counts` (X,) int64 says
    how many rows each expert gets."""

    ids: Tensor
    weights: Tensor
    counts: Tensor


class Router(nn.Module):
    """Scores of the experts, and the choice among them."""

    def __init__(self, hidden_size: int, spec: model.MoE, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.balance = spec, Balance(per_sequence=spec.seq_aux)
        self.weight = nn.Parameter(torch.empty(spec.num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(spec.num_experts, device=device, dtype=dtype)) if spec.bias else None
        self.e_score_correction_bias: Tensor | None
        bias = torch.empty(spec.num_experts, device=device, dtype=wide(dtype)) if spec.has_correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Routing:
        """The experts of tokens `x` (T, D), which are all or a part of the tokens of a batch of `shape` (B, S)."""
        weights, ids, counts = _Route.apply(x, self.weight, self.bias, self, shape)  # type: ignore[no-untyped-call]
        return Routing(ids, weights, counts)

    @torch.no_grad()
    def update_bias(self, counts: Tensor, rate: float) -> None:
        """Make experts that got fewer than the mean of `counts` (X,), summed over all ranks, likelier by `rate`, others
        less (Wang et al., 2024, arXiv:2408.15664)."""
        assert self.e_score_correction_bias is not None, "this router has no correction bias"
        load = counts.to(self.e_score_correction_bias.dtype)
        self.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=rate)


def routers(module: nn.Module) -> Iterator[tuple[str, Router]]:
    """Every router below `module`, with its name."""
    yield from ((name, part) for name, part in module.named_modules() if isinstance(part, Router))


def choose(scores: Tensor, bias: Tensor | None, spec: model.MoE) -> Tensor:
    """The numbers (T, k) of the experts with the best `scores` (T, X), from the best groups where there are groups."""
    scores = scores if bias is None else scores + bias
    if spec.n_group > 1:
        groups = scores.view(len(scores), spec.n_group, -1)
        best = groups.topk(2, dim=-1).values.sum(dim=-1) if spec.has_correction_bias else groups.amax(dim=-1)
        kept = best.topk(spec.topk_group, dim=-1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        scores = groups.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
    return scores.topk(spec.num_experts_per_tok, dim=-1).indices


def count(ids: Tensor, num_experts: int) -> Tensor:
    """How often each expert (X,) is among `ids`, without waiting for the device."""
    flat = ids.flatten()
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


class _Route(torch.autograd.Function):
    """Keeps the tokens, all scores and the choice; the gradient of the auxiliary loss is added in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, router: Router, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        spec, dtype = router.spec, wide(x.dtype)
        inputs, matrix = x.to(dtype), weight.to(dtype).T
        logits = torch.mm(inputs, matrix) if bias is None else torch.addmm(bias.to(dtype), inputs, matrix)
        scores = logits.softmax(dim=-1) if spec.scoring_func == "softmax" else logits.sigmoid()
        ids = choose(scores, router.e_score_correction_bias, spec)
        weights = scores.gather(1, ids)
        if spec.norm_topk_prob:
            weights /= _total(weights, spec)
        counts = count(ids, spec.num_experts)
        ctx.save_for_backward(x, weight, scores, ids)
        ctx.router, ctx.shape = router, shape
        ctx.mark_non_differentiable(ids, counts)
        return weights.mul_(spec.routed_scaling_factor), ids, counts

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, scores, ids = ctx.saved_tensors
        spec: model.MoE = ctx.router.spec
        grad_scores = torch.zeros_like(scores).scatter_(1, ids, _grad_chosen(grad, scores.gather(1, ids), spec))
        _balance(ctx.router, scores, ids, ctx.shape, grad_scores)
        if spec.scoring_func == "softmax":
            grad_logits = torch._softmax_backward_data(grad_scores, scores, -1, scores.dtype)
        else:
            grad_logits = torch.ops.aten.sigmoid_backward(grad_scores, scores)
        grad_x = torch.mm(grad_logits, weight.to(scores.dtype)).to(x.dtype)
        grad_bias = grad_logits.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, torch.mm(grad_logits.T, x.to(scores.dtype)).to(weight.dtype), grad_bias, None, None


def _total(chosen: Tensor, spec: model.MoE) -> Tensor:
    total = chosen.sum(dim=-1, keepdim=True)
    return total if spec.scoring_func == "softmax" else total + _TINY


def _grad_chosen(grad: Tensor, chosen: Tensor, spec: model.MoE) -> Tensor:
    """The gradient of the chosen scores (T, k) from that of the weights."""
    grad = grad * spec.routed_scaling_factor
    if not spec.norm_topk_prob:
        return grad
    total = _total(chosen, spec)
    return (grad - (grad * chosen).sum(dim=-1, keepdim=True) / total) / total


def _balance(router: Router, scores: Tensor, ids: Tensor, shape: tuple[int, int], grad: Tensor) -> None:
    """Record the choice, and add the gradient of the auxiliary loss with respect to `scores` (T, X) to `grad`."""
    balance, experts = router.balance, router.spec.num_experts
    counts = count(ids, experts)
    balance.counts = counts if balance.counts is None else balance.counts + counts
    if not balance.weight:
        return
    if balance.per_sequence:
        first = 0 if len(ids) == shape[0] * shape[1] else balance.part * len(ids)
        sequence = torch.arange(first, first + len(ids), device=ids.device) // shape[1]
        counts = balance.sum_counts(count(ids + sequence[:, None] * experts, shape[0] * experts))
        counts = counts.view(shape[0], experts).to(scores.dtype)
        shares = (counts / counts.sum(dim=-1, keepdim=True)).index_select(0, sequence)
    else:
        counts = balance.sum_counts(counts).to(scores.dtype)
        shares = counts * (router.spec.num_experts_per_tok / counts.sum())
    total = scores.sum(dim=-1, keepdim=True)
    pull = shares * (balance.weight * experts)
    loss = (scores * pull).sum(dim=-1, keepdim=True) / total
    grad += (pull - loss) / total
    balance.loss = loss.sum() if balance.loss is None else balance.loss + loss.sum()
