"""Ring attention: every rank has some positions of each row, and passes keys and values around a ring of ranks (Liu et
al., 2023, arXiv:2310.01889).

A row is split into 2 * cp pieces, and rank i has pieces i and 2 * cp - 1 - i. With one contiguous piece per rank,
causal attention would give the last rank most of the work. While a rank computes with the current keys and values, it
sends them to the next rank and receives the next ones from the previous rank. Blocks whose keys all come after the
queries, or belong to other documents, are skipped. The backward pass sends keys and values around the ring too. The
gradients of keys and values, in the dtype of scores, follow one step behind and are complete when they reach the rank
that has these keys.

PyTorch's dispatcher sees one operator, so selective recomputation saves its result and sends nothing twice.
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
from kumi.nn.attention.attention_context import AttentionFn
from kumi.nn.attention.attention_operators import (
    empty_sums,
    fake_grads,
    fake_output_and_lse,
    finish_output,
    group_backward_inputs,
)
from kumi.nn.attention.flash_partial import Tile
from kumi.nn.attention.partial_attention import Block, key_value_part, ungroup_heads
from kumi.nn.attention.scores import PLAIN_SCORES, SCORES_SCHEMA, Scores
from kumi.nn.dtypes import wide
from kumi.parallel.token_collectives import IMPLEMENTATIONS

# The pairs of queries and keys to compute: blocks of matmuls, or tiles of fused kernels.
_Visible = TypeVar("_Visible")


def positions_of_rank(length: int, cp: int, index: int) -> Tensor:
    """Return the positions (length / cp,) of rank `index` of `cp` in a row of `length`: pieces i and 2 * cp - 1 - i."""
    near, far = torch.arange(length).view(2 * cp, -1)[[index, 2 * cp - 1 - index]]
    return torch.cat([near, far])


def ring_attention_fn(cu_seqlens: list[int], group: dist.ProcessGroup) -> AttentionFn:
    """Return the attention function of rows that are sharded over `group` by `positions_of_rank`.

    `cu_seqlens`: the index of each document's first token in the flattened unsharded rows, and at the end the number of
    tokens of these rows.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        out: Tensor = RING_ATTENTION(q, k, v, cu_seqlens, window or 0, group.group_name, sinks, *scores)[0]
        return out

    return attend


@dataclass(frozen=True)
class _Exchange:
    """A pending exchange: `sent` goes to the next rank, `received` comes from the previous one."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait for the two transfers, and return the received tensor."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class _Ring:
    """The ring of ranks, and the index of this rank."""

    group: dist.ProcessGroup
    size: int
    index: int

    def pass_on(self, tensor: Tensor) -> _Exchange:
        """Begin to send `tensor` to the next rank, and to receive a tensor of its shape from the previous rank."""
        received = torch.empty_like(tensor)
        following, previous = (self.index + 1) % self.size, (self.index - 1) % self.size
        transfers = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous),
        ]
        return _Exchange(tensor, received, dist.batch_isend_irecv(transfers))


class _Sizes(NamedTuple):
    """Shapes of keys (B, M, K, E) and values (B, M, K, E'), which are sent as one flat tensor.

    M is the number of positions of a rank, K of key heads.
    """

    keys: torch.Size
    values: torch.Size

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        k, v = torch.split(packed, [self.keys.numel(), self.values.numel()])
        return k.view(self.keys), v.view(self.values)


def _ring(name: str) -> _Ring:
    group = group_by_name(name)
    return _Ring(group, group.size(), group.rank())


def _plan(
    cu_seqlens: tuple[int, ...], rows: int, window: int, cp: int, index: int, source: int, device: torch.device
) -> tuple[Block, ...]:
    """Return the blocks of queries of rank `index` that see keys of rank `source`."""
    return _plans(cu_seqlens, rows, window, cp, index, device)[source]


# The masks of a microbatch take megabytes, so only four results are kept: those of the last two microbatches in a model
# with two windows.
@lru_cache(maxsize=4)
def _plans(
    cu_seqlens: tuple[int, ...], rows: int, window: int, cp: int, index: int, device: torch.device
) -> list[tuple[Block, ...]]:
    """Return the results of `_plan` for all ranks as `source`."""
    earliest, length = partial_attention.first_visible(cu_seqlens, rows, window), cu_seqlens[-1] // rows
    queries, *parts = (positions_of_rank(length, cp, rank) for rank in (index, *range(cp)))
    return [partial_attention.query_blocks(queries, keys, earliest, length // (2 * cp), device) for keys in parts]


# A function like `_plan`.
_BlockPlan = Callable[..., tuple[Block, ...]]


def _rounds(
    ring: _Ring, packed: Tensor, cu_seqlens: list[int], window: int, rows: int, plan: Callable[..., _Visible]
) -> Iterator[tuple[Tensor, Tensor, _Visible]]:
    """Yield for each round the packed keys and values, the keys' positions, and the result of `plan` for them.

    `packed`: this rank's keys and values. While the caller computes with them, they are sent to the next rank.
    """
    for turn in range(ring.size):
        exchange = ring.pass_on(packed) if turn + 1 < ring.size else None
        source = (ring.index - turn) % ring.size
        positions = positions_of_rank(cu_seqlens[-1] // rows, ring.size, source)
        yield packed, positions, plan(tuple(cu_seqlens), rows, window, ring.size, ring.index, source, packed.device)
        packed = exchange.wait() if exchange else packed


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int,
    group: str,
    sinks: Tensor | None = None,
    *score_options: Any,
    plan: _BlockPlan = _plan,
) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's queries over all keys, and its log-sum-exp (B, N, H).

    `window`: 0 for none.
    `score_options`: the fields of `Scores`.
    """
    scores = Scores(*score_options)
    if plan is _plan and _uses_fused_kernels(q, v, cu_seqlens, window, scores):
        return _fused_forward(q, k, v, cu_seqlens, group, sinks, scores.scale)
    sizes, (queries, out, lse) = _Sizes(k.shape, v.shape), empty_sums(q, k, v)
    for packed, positions, visible in _rounds(_ring(group), sizes.pack(k, v), cu_seqlens, window, len(q), plan):
        if visible:
            part = key_value_part(*sizes.unpack(packed), positions, cu_seqlens, scores, backward=False)
            partial_attention.attend_blocks(queries, part, visible, out, lse)
    return finish_output(out, lse, sinks, q.dtype)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: list[int],
    window: int,
    group: str,
    *score_options: Any,
    plan: _BlockPlan = _plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's `q`, `k` and `v`, given the gradient of `out`."""
    scores = Scores(*score_options)
    if plan is _plan and _uses_fused_kernels(q, v, cu_seqlens, window, scores):
        return _fused_backward(grad, q, k, v, out, lse, cu_seqlens, group, scores.scale)
    ring, sizes = _ring(group), _Sizes(k.shape, v.shape)
    queries, grads, sums, delta = group_backward_inputs(grad, q, out, lse, k.shape[2])
    grad_q = torch.zeros_like(queries, dtype=lse.dtype)

    def parts() -> Iterator[Tensor]:
        """Yield the gradients of each round's keys and values, and add to `grad_q`."""
        for packed, positions, visible in _rounds(ring, sizes.pack(k, v), cu_seqlens, window, len(q), plan):
            grad_k, grad_v = (x.new_zeros(x.transpose(1, 2).shape, dtype=lse.dtype) for x in sizes.unpack(packed))
            if visible:
                part = key_value_part(*sizes.unpack(packed), positions, cu_seqlens, scores, backward=True)
                partial_attention.attend_blocks_backward(
                    queries, part, visible, grads, sums, delta, grad_q, grad_k, grad_v
                )
            yield sizes.pack(grad_k.transpose(1, 2), grad_v.transpose(1, 2))

    total_k, total_v = sizes.unpack(_reduce_to_owner(ring, parts()))
    factor = scores.factor(q.shape[-1])
    return ungroup_heads(grad_q * factor).to(q.dtype).contiguous(), (total_k * factor).to(k.dtype), total_v.to(v.dtype)


def _reduce_to_owner(ring: _Ring, parts: Iterator[Tensor]) -> Tensor:
    """Return the gradient of this rank's keys and values, summed over ranks.

    `parts`: for each round the gradient of the current keys and values by this rank's queries. The first round has the
    keys of this rank.
    """
    local: Tensor | None = None  # the gradient of this rank's keys by this rank's queries
    exchange: _Exchange | None = None  # the partial sums of the next round's keys, from the previous rank
    for part in parts:
        if local is None:
            local = part
        else:
            exchange = ring.pass_on(part if exchange is None else part.add_(exchange.wait()))
    assert local is not None
    return local if exchange is None else local.add_(exchange.wait())


def _uses_fused_kernels(q: Tensor, v: Tensor, cu_seqlens: list[int], window: int, scores: Scores) -> bool:
    """Return True if fused kernels compute this attention: without softcap, ALiBi and a window that is shorter than
    the unsharded rows, which have cu_seqlens[-1] / B positions."""
    return scores.fused and flash_partial.supports_flash(q, v) and not 0 < window < cu_seqlens[-1] // len(q)


@lru_cache(maxsize=64)
def _tiles(
    cu_seqlens: tuple[int, ...], rows: int, window: int, cp: int, index: int, source: int, device: torch.device
) -> tuple[Tile, ...]:
    """Return the tiles of queries of rank `index` over keys of rank `source`, without a window."""
    queries, keys = (positions_of_rank(cu_seqlens[-1] // rows, cp, rank) for rank in (index, source))
    return flash_partial.attention_tiles(cu_seqlens, rows, queries, keys, device)


def _fused_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], group: str, sinks: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the result of `_forward`, by fused kernels."""
    q, sizes = q.contiguous(), _Sizes(k.shape, v.shape)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=wide(q.dtype))
    lse = out.new_full(out.shape[:-1], -torch.inf)
    for packed, _, visible in _rounds(_ring(group), sizes.pack(k, v), cu_seqlens, 0, len(q), _tiles):
        flash_partial.attend_tiles(q, *sizes.unpack(packed), visible, out, lse, scale)
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
    cu_seqlens: list[int],
    group: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `_backward`, by fused kernels."""
    grad, q, ring, sizes, dtype = grad.contiguous(), q.contiguous(), _ring(group), _Sizes(k.shape, v.shape), lse.dtype
    grad_q = torch.zeros_like(q, dtype=dtype)

    def parts() -> Iterator[Tensor]:
        """Yield the gradients of each round's keys and values, and add to `grad_q`."""
        for packed, _, visible in _rounds(ring, sizes.pack(k, v), cu_seqlens, 0, len(q), _tiles):
            part = torch.zeros_like(packed, dtype=dtype)
            grads = grad_q, *sizes.unpack(part)
            flash_partial.attend_tiles_backward(grad, q, *sizes.unpack(packed), visible, out, lse, *grads, scale)
            yield part

    total_k, total_v = sizes.unpack(_reduce_to_owner(ring, parts()))
    return grad_q.to(q.dtype), total_k.to(k.dtype), total_v.to(v.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.cu_seqlens, ctx.window, ctx.group, sinks = inputs[:7]
    ctx.scores = inputs[7:]
    ctx.save_for_backward(*tensors, *output, sinks)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    operator = torch.ops.kumi.ring_attention_backward.default
    *tensors, out, lse, sinks = ctx.saved_tensors
    grad_sinks = None if sinks is None else partial_attention.grad_of_sinks(grad, out, lse, sinks)
    grads = operator(grad, *tensors, out, lse, ctx.cu_seqlens, ctx.window, ctx.group, *ctx.scores)
    return *grads, None, None, None, grad_sinks, *(None for _ in ctx.scores)


def _define(name: str, schema: str, function: Any, fake: Any) -> None:
    torch.library.define(name, schema)
    for device in ("CPU", "CUDA"):
        torch.library.impl(name, device, function)
    torch.library.register_fake(name, fake)


# `bounds` are the `cu_seqlens` of `_forward`.
_MASK_ARGS = "int[] bounds, int window, str group"
_define(
    "kumi::ring_attention",
    f"(Tensor q, Tensor k, Tensor v, {_MASK_ARGS}, Tensor? sinks=None, {SCORES_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    fake_output_and_lse,
)
_define(
    "kumi::ring_attention_backward",
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASK_ARGS}, {SCORES_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
    _backward,
    fake_grads,
)
torch.library.register_autograd("kumi::ring_attention", _differentiate, setup_context=_save)

# The operator in PyTorch's dispatcher.
RING_ATTENTION = torch.ops.kumi.ring_attention.default
IMPLEMENTATIONS.update({RING_ATTENTION: _forward, torch.ops.kumi.ring_attention_backward.default: _backward})
