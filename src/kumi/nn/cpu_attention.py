"""Causal attention over packed documents on the CPU: in blocks of queries, as matrix products at full speed.

PyTorch's own kernel (`kumi.nn.cpu_flash`) knows windows only by a mask over all pairs of positions, and neither sinks
nor other scores; in bfloat16 it is slower than products that a CPU has instructions for. Here a block of queries meets
only the keys that one of them may see: those of its documents, up to itself, within the window. Scores and softmax are
in float32 or wider. The backward pass computes each block's probabilities again, so nothing of size S x S is kept (Dao
et al., 2022, arXiv:2205.14135).

Where the documents of a batch can be divided evenly among PyTorch's threads, each thread computes whole documents:
the products of a block are too small to be divided themselves.

To PyTorch's dispatcher this is one operator: selective recomputation, FLOP counting and tracing see it whole.

Inside, tokens are numbered through the batch, T = B * S, and the G = H / K query heads of a key head are rows beside
each other: a block of n queries is a (K, G * n, E) matrix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.dtypes import wide
from kumi.nn.scores import PLAIN, SCHEMA, Scores, uncapped
from kumi.nn.threads import side_by_side

# Queries of a block: fewer waste less on masked pairs, more make larger matrix products.
BLOCK = 128
# Keys before a block are taken in this many at a time, so that products come in few shapes: oneDNN compiles a kernel
# for each shape it meets and keeps it, and documents have every length.
UNIT = 64
# Documents are divided into this many parts a thread, so that one that is done early takes another; and not at all
# where the longest document would keep a thread this many times as long as an equal share.
PARTS, UNEVEN = 2, 1.5


class _Block(NamedTuple):
    """Queries `start` to `stop`; the first key at hand; and the first key that all of the queries may see."""

    first: int
    start: int
    stop: int
    seen_by_all: int


class _Mask(NamedTuple):
    """The first token (T,) of each query's document, the first key (T,) that it sees, and (BLOCK, BLOCK) -inf where a
    key comes after the query."""

    begins: Tensor
    earliest: Tensor
    future: Tensor


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Sequence[int],
    window: int | None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN,
) -> Tensor:
    """Attention (B, S, H, E') of `q` (B, S, H, E) over `k` (B, S, K, E) and `v` (B, S, K, E').

    `bounds` are the tokens, numbered through the batch, at which documents begin, and T at the end; a row begins one.
    A position sees the `window` latest positions of its document, itself included; and a key whose score is that of
    its head in `sinks` (H,), and whose value is zero.
    """
    out: Tensor = OPERATOR(q, k, v, list(bounds), window or 0, sinks, *scores)
    return out


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[int], window: int, sinks: Tensor | None = None, *how: Any
) -> Tensor:
    shares = _shares(bounds, window)
    parts = [partial(_forward, *x, share, window, sinks, *how) for *x, share in _divided((q, k, v), shares)]
    return _joined(side_by_side(parts), (*q.shape[:-1], v.shape[-1]))


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    window: int,
    sinks: Tensor | None = None,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shares = _shares(bounds, window)
    parts = [partial(_gradients, *x, share, window, sinks, *how) for *x, share in _divided((grad, q, k, v), shares)]
    *of_inputs, of_sinks = zip(*side_by_side(parts), strict=True)
    of_q, of_k, of_v = (_joined(each, x.shape) for each, x in zip(of_inputs, (q, k, v), strict=True))
    return of_q, of_k, of_v, sum(of_sinks[1:], of_sinks[0])


def _shares(bounds: list[int], window: int) -> list[list[int]]:
    """Return the bounds of the documents of each part; a single part where threads would idle."""
    threads = torch.get_num_threads()
    costs = [n * (BLOCK + min(n, window or n)) for n in (stop - start for start, stop in pairwise(bounds))]
    if threads == 1 or max(costs, default=0) * threads > UNEVEN * sum(costs):
        return [bounds]
    done, parts = [0, *accumulate(costs)], PARTS * threads
    ends = [bisect_left(done, done[-1] * part / parts) for part in range(1, parts)]
    cuts = sorted({0, *ends, len(costs)})
    return [bounds[start : stop + 1] for start, stop in pairwise(cuts)]


def _divided(inputs: Sequence[Tensor], shares: list[list[int]]) -> Iterator[tuple[Any, ...]]:
    """Yield, for each of `shares`, its tokens of the `inputs` (B, S, H, E) as (1, t, H, E), and its bounds from 0."""
    if len(shares) == 1:
        yield *inputs, shares[0]
        return
    tokens = [x.flatten(0, 1)[None] for x in inputs]
    for first, *others in shares:
        yield *(x[:, first : others[-1]] for x in tokens), [0, *(bound - first for bound in others)]


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)).view(shape)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: list[int], window: int, sinks: Tensor | None = None, *how: Any
) -> Tensor:
    scores = Scores(*how)
    queries, keys = _split(q, k.shape[2]), _scaled_keys(k, scores)
    values = v.flatten(0, 1).transpose(0, 1).contiguous()
    out = queries.new_empty(*queries.shape[:-1], v.shape[-1])
    mask = _mask(bounds, window, keys.dtype)
    for block in _blocks(mask.earliest):
        weights, _, _ = _weights(_rows(queries, block), keys, block, mask, sinks, scores)
        _put(out, block, torch.bmm(weights.to(q.dtype), values[:, block.first : block.stop]))
    return out.view(*q.shape[:-1], -1)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    window: int,
    sinks: Tensor | None = None,
    *how: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = Scores(*how)
    queries, grads, keys = _split(q, k.shape[2]), _split(grad, k.shape[2]), _scaled_keys(k, scores)
    plain_keys = keys if scores.softcap is None else keys * scores.softcap
    narrow_keys = plain_keys.transpose(1, 2).to(q.dtype).contiguous()
    values = v.flatten(0, 1).permute(1, 2, 0).contiguous()
    grad_q, mask = torch.empty_like(queries), _mask(bounds, window, keys.dtype)
    grad_k, grad_v = (keys.new_zeros(*narrow_keys.shape[:-1], x.shape[-1]) for x in (k, v))
    grad_sinks = keys.new_zeros(0 if sinks is None else sinks.shape[0])
    for block in _blocks(mask.earliest):
        seen = slice(block.first, block.stop)
        rows, out_rows = _rows(queries, block), _rows(grads, block)
        weights, nowhere, tangents = _weights(rows, keys, block, mask, sinks, scores)
        weights = weights.to(q.dtype)
        grad_v[:, seen] += torch.bmm(weights.transpose(1, 2), out_rows)
        grad_weights = torch.bmm(out_rows, values[:, :, seen])
        if nowhere is not None:
            lost = (grad_weights * weights).sum(-1, dtype=keys.dtype) * nowhere
            grad_sinks -= lost.view(sinks.shape[0], -1).sum(-1)  # type: ignore[union-attr]
        # The sinks' column is left out: their value is zero, and so is the gradient of its weight.
        grad_scores = uncapped(torch._softmax_backward_data(grad_weights, weights, -1, q.dtype), tangents)
        _put(grad_q, block, torch.bmm(grad_scores, narrow_keys[:, seen]))
        grad_k[:, seen] += torch.bmm(grad_scores.transpose(1, 2), rows)
    grad_k *= scores.factor(k.shape[-1])
    grad_k, grad_v = (g.transpose(0, 1).to(x.dtype).contiguous().view(x.shape) for g, x in ((grad_k, k), (grad_v, v)))
    return grad_q.view(q.shape), grad_k, grad_v, grad_sinks if sinks is None else grad_sinks.to(sinks.dtype)


def _mask(bounds: Sequence[int], window: int, dtype: torch.dtype) -> _Mask:
    marks = torch.tensor(bounds)
    begins = torch.repeat_interleave(marks[:-1], marks.diff())
    # It never falls from one query to the next.
    earliest = torch.maximum(begins, torch.arange(len(begins)) - window + 1) if window else begins
    return _Mask(begins, earliest, torch.full((BLOCK, BLOCK), -torch.inf, dtype=dtype).triu_(1))


def _blocks(earliest: Tensor) -> Iterator[_Block]:
    for start in range(0, len(earliest), BLOCK):
        stop = min(start + BLOCK, len(earliest))
        first = int(earliest[start])
        yield _Block(first - first % UNIT, start, stop, int(earliest[stop - 1]))


def _weights(
    rows: Tensor, keys: Tensor, block: _Block, mask: _Mask, sinks: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The attention probabilities (K, G * n, m) of a block's queries over the m keys from its first on, and over the
    sinks (K, G * n); and what `Scores.capped` gives besides."""
    found, tangents = scores.capped(torch.bmm(rows.to(keys.dtype), keys[:, :, block.first : block.stop]))
    count, before = block.stop - block.start, block.start - block.first
    each_head = found.view(keys.shape[0], -1, count, before + count)
    tilt = scores.tilt(keys, *keys.shape[:2])
    if tilt is not None:
        # Distances from the block's first query in place of each query's own: one number less in all of its scores.
        places = torch.arange(block.first, block.stop)
        places = places - mask.begins[block.first : block.stop] if tilt.stepped else places
        each_head += tilt.of_keys(places, block.start)[:, :, None]
    each_head[..., before:] += mask.future[:count, :count]
    if block.seen_by_all > block.first:
        early = torch.arange(block.first, block.seen_by_all) < mask.earliest[block.start : block.stop, None]
        each_head[..., : early.shape[1]].masked_fill_(early, -torch.inf)
    if sinks is None:
        return torch.softmax(found, dim=-1), None, tangents
    column = sinks.to(keys.dtype).view(keys.shape[0], -1, 1).expand(-1, -1, count)
    excess = None if tilt is None else tilt.of_queries(count)
    if excess is not None:
        column = column + excess
    weights = torch.softmax(torch.cat([found, column.reshape(keys.shape[0], -1, 1)], dim=-1), dim=-1)
    return weights[..., :-1], weights[..., -1], tangents


def _split(x: Tensor, kv_heads: int) -> Tensor:
    """`x` (B, S, H, E) as (T, K, G, E)."""
    return x.reshape(x.shape[0] * x.shape[1], kv_heads, -1, x.shape[3])


def _rows(x: Tensor, block: _Block) -> Tensor:
    """The block's queries of `x` (T, K, G, E) as (K, G * n, E)."""
    return x[block.start : block.stop].permute(1, 2, 0, 3).reshape(x.shape[1], -1, x.shape[3])


def _put(out: Tensor, block: _Block, rows: Tensor) -> None:
    """The inverse of `_rows`."""
    _, kv_heads, group, size = out.shape
    out[block.start : block.stop] = rows.view(kv_heads, group, -1, size).permute(2, 0, 1, 3)


def _scaled_keys(k: Tensor, scores: Scores) -> Tensor:
    """`k` (B, S, K, E) as (K, E, T), multiplied by `Scores.key_factor`, in the dtype of scores."""
    keys: Tensor = k.flatten(0, 1).permute(1, 2, 0).to(wide(k.dtype)).contiguous()
    return keys * scores.key_factor(k.shape[-1])


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    window: int,
    sinks: Tensor | None = None,
    *how: Any,
) -> tuple[Tensor, ...]:
    of_inputs = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return *of_inputs, q.new_empty(0, dtype=wide(q.dtype)) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.bounds, ctx.window, sinks = inputs[:6]
    ctx.scores = inputs[6:]
    ctx.save_for_backward(*tensors, sinks)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    operator = torch.ops.kumi.packed_attention_backward.default
    *tensors, sinks = ctx.saved_tensors
    *of_tensors, of_sinks = operator(grad, *tensors, ctx.bounds, ctx.window, sinks, *ctx.scores)
    return *of_tensors, None, None, None if sinks is None else of_sinks, *(None for _ in ctx.scores)


def attention_flops(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any) -> int:
    """As PyTorch counts attention: two products over all S x S pairs."""
    batch, length, heads, size = q
    return 2 * batch * heads * length * length * (size + v[3])


def attention_backward_flops(
    grad: tuple[int, ...], q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any
) -> int:
    """As PyTorch counts attention: five products, the scores' again, and two for each of the forward's."""
    batch, length, heads, size = q
    return 2 * batch * heads * length * length * (3 * size + 2 * v[3])


def _define(name: str, schema: str, function: Any, fake: Any, flops: Any) -> None:
    """Make `function` the operator `name` on the CPU.

    `torch.library.custom_op` would do the same, but imports torch's compiler when it is first called: a second or more.
    """
    torch.library.define(name, schema)
    torch.library.impl(name, "CPU", function)
    torch.library.register_fake(name, fake)
    register_flop_formula(getattr(torch.ops.kumi, name.removeprefix("kumi::")))(flops)


_INPUTS = f"Tensor q, Tensor k, Tensor v, int[] bounds, int window, Tensor? sinks=None, {SCHEMA}"
_define("kumi::packed_attention", f"({_INPUTS}) -> Tensor", _attention, _fake, attention_flops)
_define(
    "kumi::packed_attention_backward",
    f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    attention_backward_flops,
)
torch.library.register_autograd("kumi::packed_attention", _differentiate, setup_context=_save)

# The operator as PyTorch's dispatcher knows it.
OPERATOR = torch.ops.kumi.packed_attention.default
