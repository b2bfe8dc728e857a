"""Ring attention: every rank has some positions of each row, and keys and values go round (Liu et al., 2023,
arXiv:2310.01889).

A row is cut into 2 * cp pieces, of which rank i has pieces i and 2 * cp - 1 - i: with causal attention the rank of the
first pieces would have little to compute otherwise, and all would wait for that of the last. While a rank computes with
the keys and values at hand, they go on to the next rank and those of the one before come in. Pieces whose keys are all
ahead of the queries, or of other documents, are not computed. In the backward pass keys and values go round again, and
their gradients, in the dtype of scores, follow one step behind, so that a full circle brings them home.

To PyTorch's dispatcher this is one operator: selective recomputation keeps its result, and communicates nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.compat import group_by_name
from kumi.nn.attention import flash_partial, partial_attention
from kumi.nn.attention.attention_context import Attend
from kumi.nn.attention.chunked_attention import fake_gradients, fake_with_sums
from kumi.nn.attention.flash_partial import Tile
from kumi.nn.attention.partial_attention import Block, arranged, join, split
from kumi.nn.attention.scores import PLAIN, SCHEMA, Scores
from kumi.nn.dtypes import wide
from kumi.parallel.token_collectives import INSIDE

# What says which queries see which keys: blocks of products, or tiles of fused kernels.
Seen = TypeVar("Seen")


def positions_of(length: int, cp: int, index: int) -> Tensor:
    """The positions (length / cp,) of a row of `length` that rank `index` of `cp` has: pieces i and 2 * cp - 1 - i."""
    near, far = torch.arange(length).view(2 * cp, -1)[[index, 2 * cp - 1 - index]]
    return torch.cat([near, far])


def ring_over(bounds: list[int], group: dist.ProcessGroup) -> Attend:
    """The attention of rows of which the ranks of `group` have their positions; documents begin at the tokens `bounds`,
    numbered through the whole rows, which also end with the count of tokens."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        out: Tensor = OPERATOR(q, k, v, bounds, window or 0, group.group_name, sinks, *scores)[0]
        return out

    return attend


@dataclass(frozen=True)
class _Underway:
    """A tensor on its way to the next rank, and what comes in from the one before."""

    mine: Tensor
    coming: Tensor
    works: list[dist.Work]

    def arrived(self) -> Tensor:
        """What the rank before has sent, once it is here and `mine` is gone."""
        for work in self.works:
            work.wait()
        return self.coming


@dataclass(frozen=True)
class _Ring:
    """The ranks that keys and values go round, and where this one stands."""

    group: dist.ProcessGroup
    size: int
    index: int

    def pass_on(self, mine: Tensor) -> _Underway:
        """Begins to send `mine` to the next rank and to receive as much from the one before."""
        coming = torch.empty_like(mine)
        onward, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        ends = [
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=onward),
            dist.P2POp(dist.irecv, coming, group=self.group, group_peer=before),
        ]
        return _Underway(mine, coming, dist.batch_isend_irecv(ends))


class _Sizes(NamedTuple):
    """Shapes of keys (B, M, K, E) and values (B, M, K, E'), which travel as one flat tensor."""

    keys: torch.Size
    values: torch.Size

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpacked(self, both: Tensor) -> tuple[Tensor, Tensor]:
        k, v = torch.split(both, [self.keys.numel(), self.values.numel()])
        return k.view(self.keys), v.view(self.values)


def _ring(name: str) -> _Ring:
    group = group_by_name(name)
    return _Ring(group, group.size(), group.rank())


@lru_cache(maxsize=64)
def _plan(
    bounds: tuple[int, ...], rows: int, window: int, cp: int, index: int, source: int, device: torch.device
) -> tuple[Block, ...]:
    """Which queries of rank `index` see which keys of rank `source`."""
    earliest, length = partial_attention.earliest(bounds, rows, window), bounds[-1] // rows
    queries, keys = (positions_of(length, cp, rank) for rank in (index, source))
    return partial_attention.blocks(queries, keys, earliest, length // (2 * cp), device)


# Which queries see which keys, given what `_plan` is given.
Plan = Callable[..., tuple[Block, ...]]


def _rounds(
    ring: _Ring, both: Tensor, bounds: list[int], window: int, rows: int, plan: Callable[..., Seen]
) -> Iterator[tuple[Tensor, Tensor, Seen]]:
    """Round by round, keys and values at hand of `both`, one flat tensor that goes on to the next rank meanwhile, the
    keys' positions, and which queries see which of them."""
    for turn in range(ring.size):
        underway = ring.pass_on(both) if turn + 1 < ring.size else None
        source = (ring.index - turn) % ring.size
        places = positions_of(bounds[-1] // rows, ring.size, source)
        yield both, places, plan(tuple(bounds), rows, window, ring.size, ring.index, source, both.device)
        both = underway.arrived() if underway else both


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    window: int,
    group: str,
    sinks: Tensor | None = None,
    *how: Any,
    plan: Plan = _plan,
) -> tuple[Tensor, Tensor]:
    scores = Scores(*how)
    if plan is _plan and _fused(q, v, bounds, window, scores):
        return _fused_forward(q, k, v, bounds, group, sinks, scores.scale)
    sizes, queries = _Sizes(k.shape, v.shape), split(q, k.shape[2])
    out = queries.new_zeros(*queries.shape[:-1], v.shape[-1], dtype=wide(q.dtype))
    lse = out.new_full(out.shape[:-1], -torch.inf)
    for both, places, along in _rounds(_ring(group), sizes.packed(k, v), bounds, window, len(q), plan):
        if along:
            part = arranged(*sizes.unpacked(both), places, bounds, scores, backward=False)
            partial_attention.forward(queries, part, along, out, lse)
    if sinks is not None:
        partial_attention.add_sinks(out, lse, sinks)
    return join(out).to(q.dtype).contiguous(), join(lse[..., None])[..., 0].contiguous()


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: list[int],
    window: int,
    group: str,
    *how: Any,
    plan: Plan = _plan,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = Scores(*how)
    if plan is _plan and _fused(q, v, bounds, window, scores):
        return _fused_backward(grad, q, k, v, out, lse, bounds, group, scores.scale)
    ring, sizes, kv_heads, dtype = _ring(group), _Sizes(k.shape, v.shape), k.shape[2], wide(q.dtype)
    queries, grads, sums = split(q, kv_heads), split(grad, kv_heads), split(lse[..., None], kv_heads)[..., 0]
    delta = split((grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True), kv_heads)[..., 0]
    grad_q = torch.zeros_like(queries, dtype=dtype)

    def parts() -> Iterator[Tensor]:
        for both, places, along in _rounds(ring, sizes.packed(k, v), bounds, window, len(q), plan):
            grad_k, grad_v = (x.new_zeros(x.transpose(1, 2).shape, dtype=dtype) for x in sizes.unpacked(both))
            if along:
                part = arranged(*sizes.unpacked(both), places, bounds, scores, backward=True)
                partial_attention.backward(queries, part, along, grads, sums, delta, grad_q, grad_k, grad_v)
            yield sizes.packed(grad_k.transpose(1, 2), grad_v.transpose(1, 2))

    total_k, total_v = sizes.unpacked(_home(ring, parts()))
    factor = scores.factor(q.shape[-1])
    return join(grad_q * factor).to(q.dtype).contiguous(), (total_k * factor).to(k.dtype), total_v.to(v.dtype)


def _home(ring: _Ring, parts: Iterator[Tensor]) -> Tensor:
    """The sum over ranks of the gradients of this rank's own keys and values, given what each round, the first of these
    keys, adds to those at hand."""
    home: Tensor | None = None
    following: _Underway | None = None  # the gradients of the keys that come in next, from the ranks before
    for added in parts:
        if home is None:
            home = added
        else:
            following = ring.pass_on(added if following is None else added.add_(following.arrived()))
    assert home is not None
    return home if following is None else home.add_(following.arrived())


def _fused(q: Tensor, v: Tensor, bounds: list[int], window: int, scores: Scores) -> bool:
    """Whether fused kernels compute this attention, whose rows have bounds[-1] / B positions."""
    return scores.fused and flash_partial.takes(q, v) and not 0 < window < bounds[-1] // len(q)


@lru_cache(maxsize=64)
def _tiles(
    bounds: tuple[int, ...], rows: int, window: int, cp: int, index: int, source: int, device: torch.device
) -> tuple[Tile, ...]:
    """What the queries of rank `index` see of the keys of rank `source`, without a window."""
    own, other = (positions_of(bounds[-1] // rows, cp, rank) for rank in (index, source))
    return flash_partial.tiles(bounds, rows, own, other, device)


def _fused_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[int], group: str, sinks: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """As `_forward`, by fused kernels."""
    q, sizes = q.contiguous(), _Sizes(k.shape, v.shape)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide(q.dtype))
    lse = out.new_full(out.shape[:-1], -torch.inf)
    for both, _, along in _rounds(_ring(group), sizes.packed(k, v), bounds, 0, len(q), _tiles):
        flash_partial.forward(q, *sizes.unpacked(both), along, out, lse, scale)
    if sinks is not None:
        partial_attention.add_sinks(out.transpose(1, 2)[:, :, None], lse.transpose(1, 2)[:, :, None], sinks)
    return out.to(q.dtype), lse


def _fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: list[int],
    group: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_backward`, by fused kernels."""
    grad, q, ring, sizes, scores = grad.contiguous(), q.contiguous(), _ring(group), _Sizes(k.shape, v.shape), lse.dtype
    grad_q = torch.zeros_like(q, dtype=scores)

    def parts() -> Iterator[Tensor]:
        for both, _, along in _rounds(ring, sizes.packed(k, v), bounds, 0, len(q), _tiles):
            added = torch.zeros_like(both, dtype=scores)
            grads = grad_q, *sizes.unpacked(added)
            flash_partial.backward(grad, q, *sizes.unpacked(both), along, out, lse, *grads, scale)
            yield added

    total_k, total_v = sizes.unpacked(_home(ring, parts()))
    return grad_q.to(q.dtype), total_k.to(k.dtype), total_v.to(v.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.bounds, ctx.window, ctx.group, sinks = inputs[:7]
    ctx.scores = inputs[7:]
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    operator = torch.ops.kumi.ring_attention_backward.default
    *tensors, out, lse, sinks = ctx.saved_tensors
    of_sinks = None if sinks is None else partial_attention.grad_of_sinks(grad, out, lse, sinks)
    found = operator(grad, *tensors, out, lse, ctx.bounds, ctx.window, ctx.group, *ctx.scores)
    return *found, None, None, None, of_sinks, *(None for _ in ctx.scores)


def _define(name: str, schema: str, function: Any, fake: Any) -> None:
    torch.library.define(name, schema)
    for device in ("CPU", "CUDA"):
        torch.library.impl(name, device, function)
    torch.library.register_fake(name, fake)


_HOW = "int[] bounds, int window, str group"
_define(
    "kumi::ring_attention",
    f"(Tensor q, Tensor k, Tensor v, {_HOW}, Tensor? sinks=None, {SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    fake_with_sums,
)
_define(
    "kumi::ring_attention_backward",
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_HOW}, {SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    fake_gradients,
)
torch.library.register_autograd("kumi::ring_attention", _differentiate, setup_context=_save)

# The operator as PyTorch's dispatcher knows it.
OPERATOR = torch.ops.kumi.ring_attention.default
INSIDE.update({OPERATOR: _forward, torch.ops.kumi.ring_attention_backward.default: _backward})
