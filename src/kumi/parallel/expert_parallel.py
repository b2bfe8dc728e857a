"""Expert parallelism: each rank has some of the routed experts; tokens are sent to their experts and back.

    rows sorted by expert  --all_to_all-->  rows of the rank's experts  --> experts -->  --all_to_all-->  rows as before

A row is the copy of a token for one of its experts. In shapes, there are T tokens with k experts each, N rows and X
experts on n ranks. No token is dropped, and there is no padding: ranks first exchange
the number of rows of each expert, then exactly these rows (Lepikhin et al., 2020, arXiv:2006.16668, without its
capacity). The ranks of expert_tp each have a part of the width of every expert: they all-gather their tokens first and
reduce-scatter the results.
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
from kumi.nn.router import Routing, rows_per_expert
from kumi.parallel.host_values import read_once
from kumi.parallel.mesh import Mesh
from kumi.parallel.token_collectives import (
    all_gather,
    all_gather_no_grad,
    all_reduce_no_grad,
    define_collective,
    reduce_scatter,
)


def apply_expert_parallel(decoder: Decoder, mesh: Mesh) -> None:
    """Make every MoE layer of `decoder`, whose parameters are sharded already, send tokens to experts on other ranks.

    Routers get what they need to count the load of sequences whose tokens are on several ranks.
    """
    exchange = ExpertExchange(mesh.group("ep"), mesh.group("expert_tp"))
    for module in decoder.modules():
        if isinstance(module, MoE):
            balance, sequence_group = module.gate.balance, mesh.group("sequence")
            if sequence_group is not None:
                # Ranks with other tokens of the same sequences add up their counts.
                balance.sum_counts = lambda counts, group=sequence_group: all_reduce_no_grad(counts, group)  # type: ignore[misc]
            balance.part = mesh.index("tp")  # the part of the tokens that this rank has under sequence parallelism
            if exchange.sends:
                module.exchange = exchange
            if exchange.expert_tp is not None:
                module.experts.adds_bias = exchange.expert_tp.rank() == 0  # once in the sum over the ranks


@dataclass(frozen=True)
class _Dispatched:
    """The context of a dispatch, from which `combine` returns the rows.

    `places` (T, k): the row of each token and choice of an expert, before the exchange.
    `order` (N,): sorts received rows by expert; None without an exchange.
    `sent`, `received`: numbers of rows to and from each rank.
    `weights` (T, k): routing weights of the choices.
    """

    places: Tensor
    order: Tensor | None
    sent: list[int]
    received: list[int]
    weights: Tensor


class ExpertExchange:
    """Sends tokens to the ranks of their experts, and returns the results.

    `ep`: the group over which experts are distributed, consecutive experts to each rank; None for a single rank.
    `expert_tp`: the group that shards the width of the same experts; None for a single rank.
    """

    def __init__(self, ep: dist.ProcessGroup | None, expert_tp: dist.ProcessGroup | None) -> None:
        self.ep, self.expert_tp = ep, expert_tp

    @property
    def sends(self) -> bool:
        """True if any rows are exchanged with other ranks."""
        return self.ep is not None or self.expert_tp is not None

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, _Dispatched]:
        """Return rows (N, D) sorted by local expert, each expert's number of rows (int64), and a `combine` context."""
        ids, weights, counts = routing.ids, routing.weights, routing.counts
        if self.expert_tp is not None:
            x, weights = all_gather(x, self.expert_tp), all_gather(weights, self.expert_tp)
            ids = all_gather_no_grad(ids, self.expert_tp)
            counts = rows_per_expert(ids, len(counts))
        places = sorted_places(ids)
        rows = spread(x, places)
        if self.ep is None:
            return rows, counts, _Dispatched(places, None, [], [], weights)
        sent, received, counts_by_rank = self._splits(counts)
        rows = exchange_rows(rows, sent, received, self.ep)
        order = _order_by_expert(counts_by_rank, sum(received))
        back = _Dispatched(places, order, sent, received, weights)
        return permute_rows(rows, order), counts_by_rank.sum(0), back

    def combine(self, rows: Tensor, routing: Routing, back: _Dispatched) -> Tensor:
        """Return for each local token (T, D) the weighted sum of its experts' results."""
        if self.ep is not None and back.order is not None:
            rows = exchange_rows(permute_rows(rows, _inverse(back.order)), back.received, back.sent, self.ep)
        out = gather_weighted(rows, back.weights, back.places)
        return out if self.expert_tp is None else reduce_scatter(out, self.expert_tp)

    def _splits(self, counts: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Return the numbers of rows sent to each rank, those received from each rank, and a table of the received
        rows.

        The table (n, X/n) has the number of rows from each rank for each local expert.
        """
        assert self.ep is not None
        sent = counts.view(self.ep.size(), -1)
        received: Tensor = EXCHANGE_COUNTS(sent, self.ep.group_name)
        sizes = read_once(torch.stack((sent.sum(1), received.sum(1))))  # the host needs the message sizes
        return sizes[0], sizes[1], received


def _order_by_expert(counts: Tensor, rows: int) -> Tensor:
    """Return the order that sorts `rows` received rows by expert.

    The rows come sorted by the rank that sent them, then by expert; `counts` (n, X/n) has the number of rows for each.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    # With `output_size`, the host need not wait for the device to know the size of the result.
    return torch.repeat_interleave(experts, counts.flatten(), output_size=rows).argsort(stable=True)


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows by an all-to-all: send sent[i] of `rows` to rank i, and return received[i] rows from each rank i.

    `rows` and the result are in the order of ranks.
    """
    out: Tensor = _ExchangeRows.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


def permute_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Return `rows` (N, D) permuted by `order` (N,)."""
    out: Tensor = _Reorder.apply(rows, order)  # type: ignore[no-untyped-call]
    return out


class _ExchangeRows(torch.autograd.Function):
    """`exchange_rows`, whose backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.options = received, sent, group.group_name
        out: Tensor = EXCHANGE_ROWS(rows, sent, received, group.group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return EXCHANGE_ROWS(grad, *ctx.options), None, None, None


def _all_to_all_rows(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group_by_name(group))
    return out


def _all_to_all_counts(counts: Tensor, group: str) -> Tensor:
    out = torch.empty_like(counts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, counts.contiguous(), group=group_by_name(group))
    return out


# Selective recomputation saves the results of these operators, so that nothing is sent twice.
EXCHANGE_ROWS = define_collective(
    "exchange_rows",
    "(Tensor rows, int[] sent, int[] received, str group) -> Tensor",
    _all_to_all_rows,
    lambda rows, sent, received, group: rows.new_empty(sum(received), rows.shape[1]),
)
EXCHANGE_COUNTS = define_collective(
    "exchange_counts",
    "(Tensor counts, str group) -> Tensor",
    _all_to_all_counts,
    lambda counts, group: torch.empty_like(counts, memory_format=torch.contiguous_format),
)


class _Reorder(torch.autograd.Function):
    """`permute_rows`, whose backward writes each gradient once: that of indexing would accumulate."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None
