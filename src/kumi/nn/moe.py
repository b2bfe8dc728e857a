"""Mixture of experts: a router, routed experts, and a shared expert.

No token is dropped: T tokens that each choose k experts give T * k rows, sorted by expert. Each of these steps can
be replaced:

    router(x)                       Routing: the chosen experts and their weights
    exchange.dispatch(x, routing)   rows sorted by expert, and the number of rows of each expert
    experts(rows, counts)           each row through its expert
    exchange.combine(rows, ...)     for each token, the weighted sum of its rows
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kumi.nn.activation_functions import Gate, activate, apply_gate_to_halves, clamped_swiglu, gate_by
from kumi.nn.grouped_gemm import add_expert_bias, grouped_linear, row_ends
from kumi.nn.linear import Linear
from kumi.nn.mlp import MLP
from kumi.nn.numerics import kernel
from kumi.nn.router import Router, Routing
from kumi.nn.wrappers import Wrapper, wrap
from kumi.spec import model


class Exchange(Protocol):
    """Sends tokens to the ranks that hold their experts, and returns the results."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Any]:
        """Return rows (N, D) sorted by local expert, each expert's number of rows (int64), and a context for `combine`.

        `x` (T, D): the local tokens.
        """

    def combine(self, rows: Tensor, routing: Routing, back: Any) -> Tensor:
        """Return for each token (T, D) the weighted sum of its experts' results.

        `rows` (N, D): the results, in the order of `dispatch`.
        `back`: the context that `dispatch` returned.
        """


class LocalExchange:
    """All experts are on this device: rows are sorted, and nothing is sent."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        places = sorted_places(routing.ids)
        return spread(x, places), routing.counts, places

    def combine(self, rows: Tensor, routing: Routing, back: Tensor) -> Tensor:
        return gather_weighted(rows, routing.weights, back)


LOCAL = LocalExchange()


class Experts(nn.Module):
    """Many experts in one tensor per matrix: down(act(gate(x)) * up(x)), or down(act(up(x))) if not gated."""

    def __init__(self, hidden_size: int, spec: model.MoE, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.how = spec, expert_gate(spec)
        # If ranks split each expert's width, only one of them adds the output bias to the sum.
        self.adds_bias = True
        count, width = spec.num_experts, spec.moe_intermediate_size * (2 if spec.gated else 1)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(count, *shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(width, hidden_size) if spec.gated else None
        self.gate_up_proj_bias = parameter(width) if spec.gated and spec.bias else None
        self.up_proj = None if spec.gated else parameter(width, hidden_size)
        self.up_proj_bias = parameter(width) if spec.bias and not spec.gated else None
        self.down_proj = parameter(hidden_size, spec.moe_intermediate_size)
        self.down_proj_bias = parameter(hidden_size) if spec.bias else None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of `rows` (N, D). The first counts[0] rows go through the first expert, and so on."""
        ends = row_ends(counts)
        if self.gate_up_proj is not None:
            halves = add_expert_bias(self.product(rows, "gate_up_proj", counts, ends), self.gate_up_proj_bias, counts)
            inner = apply_gate_to_halves(halves, self.how)
        else:
            up = add_expert_bias(self.product(rows, "up_proj", counts, ends), self.up_proj_bias, counts)
            inner = activate(up, self.spec.hidden_act)
        out = self.product(inner, "down_proj", counts, ends)
        return add_expert_bias(out, self.down_proj_bias, counts, other_rank_adds=not self.adds_bias)

    def product(self, rows: Tensor, name: str, counts: Tensor, ends: Tensor) -> Tensor:
        """Return each of `rows` (N, in) times the matrix `name` of its expert, (N, out)."""
        return grouped_linear(rows, getattr(self, name), counts, ends)


def expert_gate(spec: model.MoE) -> Gate:
    """Return the function that combines the experts' gate and up projections."""
    return gate_by(spec.hidden_act) if spec.act_limit is None else clamped_swiglu(spec.act_limit, spec.act_alpha)


class MoE(nn.Module):
    """Routed experts, and a shared expert for all tokens if the model has one."""

    def __init__(self, hidden_size: int, spec: model.MoE, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = Router(hidden_size, spec, **options)
        self.experts = Experts(hidden_size, spec, **options)
        shared = model.MLP(spec.shared_intermediate_size, hidden_act=spec.hidden_act, gated=spec.gated)
        self.shared_experts = MLP(hidden_size, shared, **options) if shared.intermediate_size else None
        gated = shared.intermediate_size and spec.shared_gate
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False, **options) if gated else None
        self.exchange: Exchange = LOCAL
        self.wrappers: list[Wrapper] = []

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the result of `compute`, called inside the wrappers in `wrappers`."""
        out: Tensor = wrap(self.wrappers, self.compute)(x, shape)
        return out

    def compute(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the output for hidden states `x` (B, S, D) or (T, D), in the same shape.

        `shape` is the (B, S) of the batch. Under sequence parallelism, `x` has only some tokens of it.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.gate(tokens, shape)
        rows, counts, back = self.exchange.dispatch(tokens, routing)
        out = self.exchange.combine(self.experts(rows, counts), routing, back).view(x.shape)
        return out if self.shared_experts is None else out + self.shared(x)

    def shared(self, x: Tensor) -> Tensor:
        """Return the shared expert's output for hidden states `x`."""
        assert self.shared_experts is not None
        out: Tensor = self.shared_experts(x)
        return out if self.shared_expert_gate is None else out * torch.sigmoid(self.shared_expert_gate(x))


def sorted_places(ids: Tensor) -> Tensor:
    """Return the row index (T, k) of each choice in `ids` (T, k) when all choices are sorted by expert, then by
    token."""
    order = ids.flatten().argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places.view(ids.shape)


def spread(x: Tensor, places: Tensor) -> Tensor:
    """Return rows (T * k, D): row places[t, j] is token x[t]."""
    rows: Tensor = _Spread.apply(x, places)  # type: ignore[no-untyped-call]
    return rows


def gather_weighted(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Return tokens (T, D) in the dtype of `rows`: token t is the sum of weights[t, j] * rows[places[t, j]]."""
    tokens: Tensor = _GatherWeighted.apply(rows, weights, places)  # type: ignore[no-untyped-call]
    return tokens


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        if (kernels := _kernels(x)) is not None:
            spread_rows: Tensor = kernels.to_experts(x, places)
            return spread_rows
        rows = x.new_empty(places.numel(), x.shape[1])
        for column in places.unbind(1):
            rows[column] = x
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return _sum(grad, None, places), None


class _GatherWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, places)
        return _sum(rows, weights, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, places = ctx.saved_tensors
        if (kernels := _kernels(rows)) is not None:
            return *kernels.from_experts_backward(grad, rows, weights, places), None
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for index, column in enumerate(places.unbind(1)):
            grad_rows[column] = (grad * weights[:, index, None]).to(rows.dtype)
            grad_weights[:, index] = (grad * rows[column]).sum(dim=-1, dtype=weights.dtype)
        return grad_rows, grad_weights, None


def _sum(rows: Tensor, weights: Tensor | None, places: Tensor) -> Tensor:
    """Return for each token the weighted sum of its rows, accumulated in float32 or wider; weights of None are 1."""
    if (kernels := _kernels(rows)) is not None:
        tokens: Tensor = kernels.from_experts(rows, weights, places)
        return tokens
    total = rows.new_zeros(len(places), rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32))
    for index, column in enumerate(places.unbind(1)):
        if weights is None:
            total += rows[column]
        else:
            total.addcmul_(rows[column], weights[:, index, None])
    return total.to(rows.dtype)


def _kernels(rows: Tensor) -> Any:
    """Return the module of kernels that is chosen for rows of this dtype, or None."""
    return None if rows.dtype == torch.float64 else kernel("experts")
