"""Expert parallelism: each rank has some of the routed experts, and tokens go to theirs and come back.

    rows sorted by expert  --all_to_all-->  rows of the rank's experts  --> experts -->  --all_to_all-->  rows as before

Nothing is dropped and nothing padded: ranks tell each other how many rows each expert gets, then exchange exactly these
(Lepikhin et al., 2020, arXiv:2006.16668, without its capacity). Ranks of expert_tp each have a part of the width of
every expert: they gather each other's tokens first, and each gets its own tokens' part of the sum at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.compat import group_by_name
from kumi.nn.decoder import Decoder
from kumi.nn.moe import MoE, gather_weighted, sorted_places, spread
from kumi.nn.router import Routing, count
from kumi.parallel.mesh import Mesh
from kumi.parallel.token_collectives import define, gather, gathered, scatter, summed


def deal(decoder: Decoder, mesh: Mesh) -> None:
    """Makes the experts of every layer, whose parameters are cut already, work with those of other ranks."""
    exchange = Exchange(mesh.group("ep"), mesh.group("expert_tp"))
    for module in decoder.modules():
        if isinstance(module, MoE):
            balance, shared = module.gate.balance, mesh.group("sequence")
            if shared is not None:
                # Ranks that have other tokens of the same sequences count together.
                balance.sum_counts = lambda counts, group=shared: summed(counts, group)  # type: ignore[misc]
            balance.part = mesh.index("tp")
            if exchange.sends:
                module.exchange = exchange
            if exchange.expert_tp is not None:
                module.experts.adds_bias = exchange.expert_tp.rank() == 0


@dataclass(frozen=True)
class _Back:
    """How to undo a dispatch: where each choice's row lies, the order in which rows came, how many went and came from
    each rank, and the weights of all rows."""

    places: Tensor
    order: Tensor | None
    sent: list[int]
    received: list[int]
    weights: Tensor


class Exchange:
    """Brings tokens to the ranks of their experts and back. `ep`: the ranks among which experts are dealt out, a run of
    consecutive ones to each; `expert_tp`: those that have parts of the same experts; None: this one alone."""

    def __init__(self, ep: dist.ProcessGroup | None, expert_tp: dist.ProcessGroup | None) -> None:
        self.ep, self.expert_tp = ep, expert_tp

    @property
    def sends(self) -> bool:
        """Whether there is anybody else."""
        return self.ep is not None or self.expert_tp is not None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, _Back]:
        """Rows (N, D) sorted by this rank's experts, how many each has (int64), and what `combine` needs."""
        ids, weights, counts = routing.ids, routing.weights, routing.counts
        if self.expert_tp is not None:
            x, weights = gather(x, self.expert_tp), gather(weights, self.expert_tp)
            ids = gathered(ids, self.expert_tp)
            counts = count(ids, len(counts))
        places = sorted_places(ids)
        rows = spread(x, places)
        if self.ep is None:
            return rows, counts, _Back(places, None, [], [], weights)
        sent, received, own = self._splits(counts)
        rows = exchange_rows(rows, sent, received, self.ep)
        order = _by_expert(own, sum(received))
        return reorder(rows, order), own.sum(0), _Back(places, order, sent, received, weights)

    def combine(self, rows: Tensor, routing: Routing, back: _Back) -> Tensor:
        """For every token of this rank (T, D) the weighted sum of its experts' results."""
        if self.ep is not None and back.order is not None:
            rows = exchange_rows(reorder(rows, _inverse(back.order)), back.received, back.sent, self.ep)
        out = gather_weighted(rows, back.weights, back.places)
        return out if self.expert_tp is None else scatter(out, self.expert_tp)

    def _splits(self, counts: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Rows that go to and come from each rank, and how many come from each rank for each expert here, (n, X/n)."""
        assert self.ep is not None
        mine = counts.view(self.ep.size(), -1)
        own: Tensor = COUNTS(mine, self.ep.group_name)
        both = torch.stack((mine.sum(1), own.sum(1))).tolist()  # sizes of messages: the host must know them
        return both[0], both[1], own


def _by_expert(own: Tensor, rows: int) -> Tensor:
    """The order that sorts by expert what came sorted by (rank, expert), given how many (n, X/n) of the `rows` there
    are of each."""
    experts = torch.arange(own.shape[1], device=own.device).repeat(own.shape[0])
    # The host knows how many: the device need not tell.
    return torch.repeat_interleave(experts, own.flatten(), output_size=rows).argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows that the ranks of `group` have for this one, `received` from each, given those for them, `sent` to each,
    in the order of ranks; gradients go the way back."""
    out: Tensor = _ExchangeRows.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """Rows (N, D) in another `order` (N,), a permutation."""
    out: Tensor = _Reorder.apply(rows, order)  # type: ignore[no-untyped-call]
    return out


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.options = received, sent, group.group_name
        out: Tensor = ROWS(rows, sent, received, group.group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ROWS(grad, *ctx.options), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group_by_name(group))
    return out


def _tell(counts: Tensor, group: str) -> Tensor:
    out = torch.empty_like(counts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, counts.contiguous(), group=group_by_name(group))
    return out


# What selective recomputation keeps, so that nothing is sent again.
ROWS = define(
    "exchange_rows",
    "(Tensor rows, int[] sent, int[] received, str group) -> Tensor",
    _exchange,
    lambda rows, sent, received, group: rows.new_empty(sum(received), rows.shape[1]),
)
COUNTS = define(
    "exchange_counts",
    "(Tensor counts, str group) -> Tensor",
    _tell,
    lambda counts, group: torch.empty_like(counts, memory_format=torch.contiguous_format),
)


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None
