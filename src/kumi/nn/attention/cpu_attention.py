"""Causal attention over packed documents on the CPU, in blocks of queries, by matrix products.

PyTorch's own CPU kernel (`kumi.nn.attention.cpu_flash`) supports windows only by a mask over all pairs of positions,
and neither sinks nor softcap nor ALiBi. On CPUs with bfloat16 instructions, it is slower than matrix products in
bfloat16. Here a block of queries is multiplied only with the keys that one of its queries may see: those of its
documents, up to the query itself, within the window. Scores and softmax are in float32 or wider. The backward pass
recomputes the probabilities of each block, so no tensor of size S x S is kept (Dao et al., 2022, arXiv:2205.14135).

A block has queries of one row, or complete rows where these are short. Every row starts a document, so a block that
goes on in the next row would have the keys of both.

If the documents of a batch can be split evenly among PyTorch's threads, each thread computes complete documents,
because the products of one block are too small to be split among threads.

PyTorch's dispatcher sees the attention as one operator, and so do selective recomputation, FLOP counting and tracing.

Layout of tensors: tokens are counted through the batch, T = B * S. The G = H / K query heads of a key head are
adjacent, so a block of n queries is a (K, G * n, E) matrix.
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

from kumi.nn.attention.attention_operators import attention_backward_flops, attention_flops, fake_grads
from kumi.nn.attention.scores import PLAIN_SCORES, SCORES_SCHEMA, Scores, softcap_backward
from kumi.nn.custom_ops import define_op
from kumi.nn.dtypes import wide
from kumi.nn.threads import run_in_threads
from kumi.spec.attention_blocks import QUERY_BLOCK, key_size

# _GROUPS: document groups per thread, so that a thread that finishes early takes another group. _UNEVEN: the documents
# are not split among threads if the longest would take a thread this many times longer than an even split.
_GROUPS, _UNEVEN = 2, 1.5


class _Block(NamedTuple):
    """Some consecutive queries and the keys that they attend to.

    `start`, `stop`: the queries.
    `first`, `last`: the keys, from `first` up to and without `last`. No query sees a key after itself.
    `seen_by_all`: the first key that all of the queries may see.
    """

    first: int
    last: int
    start: int
    stop: int
    seen_by_all: int


class _Mask(NamedTuple):
    """The causal, document and window mask.

    `begins` (T,): the first token of each query's document.
    `earliest` (T,): the first key that each query sees, by its document and the window.
    `future` (BLOCK, BLOCK): -inf where a key comes after the query, else 0.
    """

    begins: Tensor
    earliest: Tensor
    future: Tensor


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sequence[int],
    window: int | None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Return causal attention (B, S, H, E') of `q` (B, S, H, E) over `k` (B, S, K, E) and `v` (B, S, K, E').

    `cu_seqlens`: the first token of each document, counted through the batch, followed by T. Every row starts a
    document.
    `window`: a position sees at most this many latest positions of its document, itself included; None for no limit.
    `sinks` (H,): one more score per head in the softmax, as of a key with a zero value.
    """
    out: Tensor = PACKED_ATTENTION(q, k, v, list(cu_seqlens), window or 0, sinks, *scores)
    return out


def _attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], window: int, *options: Any) -> Tensor:
    """`options`: the sinks or None, and the fields of `Scores`."""
    groups = _document_groups(cu_seqlens, window)
    parts = [partial(_forward, *x, share, window, *options) for *x, share in _by_group((q, k, v), groups)]
    return _join(run_in_threads(parts), (*q.shape[:-1], v.shape[-1]))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], window: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    groups = _document_groups(cu_seqlens, window)
    parts = [partial(_gradients, *x, share, window, *options) for *x, share in _by_group((grad, q, k, v), groups)]
    *input_grads, sink_grads = zip(*run_in_threads(parts), strict=True)
    grad_q, grad_k, grad_v = (_join(each, x.shape) for each, x in zip(input_grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v, sum(sink_grads[1:], sink_grads[0])


def _document_groups(cu_seqlens: list[int], window: int) -> list[list[int]]:
    """Return the bounds of the documents in each group; a single group if splitting would leave threads idle."""
    threads = torch.get_num_threads()
    costs = [n * (QUERY_BLOCK + min(n, window or n)) for n in (stop - start for start, stop in pairwise(cu_seqlens))]
    if threads == 1 or max(costs, default=0) * threads > _UNEVEN * sum(costs):
        return [cu_seqlens]
    cumulative, parts = [0, *accumulate(costs)], _GROUPS * threads
    ends = [bisect_left(cumulative, cumulative[-1] * part / parts) for part in range(1, parts)]
    splits = sorted({0, *ends, len(costs)})
    return [cu_seqlens[start : stop + 1] for start, stop in pairwise(splits)]


def _by_group(inputs: Sequence[Tensor], groups: list[list[int]]) -> Iterator[tuple[Any, ...]]:
    """Yield the tokens of each group from `inputs` (B, S, H, E) as (1, t, H, E), and its cu_seqlens counted from 0."""
    if len(groups) == 1:
        yield *inputs, groups[0]
        return
    tokens = [x.flatten(0, 1)[None] for x in inputs]
    for first, *others in groups:
        yield *(x[:, first : others[-1]] for x in tokens), [0, *(bound - first for bound in others)]


def _join(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)).view(shape)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int,
    sinks: Tensor | None = None,
    *score_options: Any,
) -> Tensor:
    scores = Scores(*score_options)
    queries, keys = _grouped_tokens(q, k.shape[2]), _scaled_keys(k, scores)
    values = v.flatten(0, 1).transpose(0, 1).contiguous()
    out = queries.new_empty(*queries.shape[:-1], v.shape[-1])
    mask = _mask(cu_seqlens, window, keys.dtype)
    for block in _blocks(mask.earliest, q.shape[1]):
        weights, _, _ = _weights(_rows(queries, block), keys, block, mask, sinks, scores)
        _write_rows(out, block, torch.bmm(weights.to(q.dtype), values[:, block.first : block.last]))
    return out.view(*q.shape[:-1], -1)


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int,
    sinks: Tensor | None = None,
    *score_options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = Scores(*score_options)
    queries, grads, keys = _grouped_tokens(q, k.shape[2]), _grouped_tokens(grad, k.shape[2]), _scaled_keys(k, scores)
    plain_keys = keys if scores.softcap is None else keys * scores.softcap
    narrow_keys = plain_keys.transpose(1, 2).to(q.dtype).contiguous()
    values = v.flatten(0, 1).permute(1, 2, 0).contiguous()
    grad_q, mask = torch.empty_like(queries), _mask(cu_seqlens, window, keys.dtype)
    grad_k, grad_v = (keys.new_zeros(*narrow_keys.shape[:-1], x.shape[-1]) for x in (k, v))
    grad_sinks = keys.new_zeros(0 if sinks is None else sinks.shape[0])
    for block in _blocks(mask.earliest, q.shape[1]):
        seen = slice(block.first, block.last)
        rows, out_rows = _rows(queries, block), _rows(grads, block)
        weights, sink_weights, tanh = _weights(rows, keys, block, mask, sinks, scores)
        weights = weights.to(q.dtype)
        grad_v[:, seen] += torch.bmm(weights.transpose(1, 2), out_rows)
        grad_weights = torch.bmm(out_rows, values[:, :, seen])
        if sink_weights is not None:
            sink_loss = (grad_weights * weights).sum(-1, dtype=keys.dtype) * sink_weights
            grad_sinks -= sink_loss.view(sinks.shape[0], -1).sum(-1)  # type: ignore[union-attr]
        # The sinks' column can be left out: their values are zero, and so are the gradients of their weights.
        grad_scores = softcap_backward(torch._softmax_backward_data(grad_weights, weights, -1, q.dtype), tanh)
        _write_rows(grad_q, block, torch.bmm(grad_scores, narrow_keys[:, seen]))
        grad_k[:, seen] += torch.bmm(grad_scores.transpose(1, 2), rows)
    grad_k *= scores.factor(k.shape[-1])
    grad_k, grad_v = (g.transpose(0, 1).to(x.dtype).contiguous().view(x.shape) for g, x in ((grad_k, k), (grad_v, v)))
    return grad_q.view(q.shape), grad_k, grad_v, grad_sinks if sinks is None else grad_sinks.to(sinks.dtype)


def _mask(cu_seqlens: Sequence[int], window: int, dtype: torch.dtype) -> _Mask:
    boundaries = torch.tensor(cu_seqlens)
    begins = torch.repeat_interleave(boundaries[:-1], boundaries.diff())
    # `earliest` does not decrease from one query to the next.
    earliest = torch.maximum(begins, torch.arange(len(begins)) - window + 1) if window else begins
    return _Mask(begins, earliest, torch.full((QUERY_BLOCK, QUERY_BLOCK), -torch.inf, dtype=dtype).triu_(1))


def _blocks(earliest: Tensor, row: int) -> Iterator[_Block]:
    """Yield the blocks of rows of `row` tokens."""
    for start, stop in _query_ranges(len(earliest), row):
        first = int(earliest[start])
        # Round the number of keys up to one of few sizes, by keys before the visible ones, or at the batch's begin
        # after them.
        size = key_size(stop - first)
        first = max(0, stop - size)
        yield _Block(first, min(first + size, len(earliest)), start, stop, int(earliest[stop - 1]))


def _query_ranges(tokens: int, row: int) -> Iterator[tuple[int, int]]:
    """Yield the first query of each block, and the query after its last one."""
    rows = row * max(1, QUERY_BLOCK // row)  # as many short rows as fit, or a long one
    for first in range(0, tokens, rows):
        end = min(first + rows, tokens)
        yield from ((start, min(start + QUERY_BLOCK, end)) for start in range(first, end, QUERY_BLOCK))


def _weights(
    rows: Tensor, keys: Tensor, block: _Block, mask: _Mask, sinks: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the attention probabilities of a block's queries, those of the sinks, and the tanh of the softcap.

    - Probabilities: (K, G * n, m), over the m keys that begin with the block's first key.
    - Probabilities of the sinks: (K, G * n), or None without sinks.
    - tanh: (K, G * n, m), or None without softcap.
    """
    logits, tanh = scores.apply_softcap(torch.bmm(rows.to(keys.dtype), keys[:, :, block.first : block.last]))
    count, before = block.stop - block.start, block.start - block.first
    each_head = logits.view(keys.shape[0], -1, count, block.last - block.first)
    alibi = scores.alibi_bias(keys, *keys.shape[:2])
    if alibi is not None:
        # Measure distances from the block's first query: all scores of a query shift by the same number.
        positions = torch.arange(block.first, block.last)
        positions = positions - mask.begins[block.first : block.last] if alibi.bf16_bias else positions
        each_head += alibi.key_bias(positions, block.start)[:, :, None]
    each_head[..., before : before + count] += mask.future[:count, :count]
    if block.last > block.stop:
        each_head[..., before + count :] = -torch.inf
    if block.seen_by_all > block.first:
        early = torch.arange(block.first, block.seen_by_all) < mask.earliest[block.start : block.stop, None]
        each_head[..., : early.shape[1]].masked_fill_(early, -torch.inf)
    if sinks is None:
        return torch.softmax(logits, dim=-1), None, tanh
    column = sinks.to(keys.dtype).view(keys.shape[0], -1, 1).expand(-1, -1, count)
    excess = None if alibi is None else alibi.query_excess(count)
    if excess is not None:
        column = column + excess
    weights = torch.softmax(torch.cat([logits, column.reshape(keys.shape[0], -1, 1)], dim=-1), dim=-1)
    return weights[..., :-1], weights[..., -1], tanh


def _grouped_tokens(x: Tensor, kv_heads: int) -> Tensor:
    """Return `x` (B, S, H, E) as (T, K, G, E)."""
    return x.reshape(x.shape[0] * x.shape[1], kv_heads, -1, x.shape[3])


def _rows(x: Tensor, block: _Block) -> Tensor:
    """Return the block's queries of `x` (T, K, G, E) as (K, G * n, E)."""
    return x[block.start : block.stop].permute(1, 2, 0, 3).reshape(x.shape[1], -1, x.shape[3])


def _write_rows(out: Tensor, block: _Block, rows: Tensor) -> None:
    """Write `rows` (K, G * n, E) to the block's queries of `out` (T, K, G, E): the inverse of `_rows`."""
    _, kv_heads, group, size = out.shape
    out[block.start : block.stop] = rows.view(kv_heads, group, -1, size).permute(2, 0, 1, 3)


def _scaled_keys(k: Tensor, scores: Scores) -> Tensor:
    """Return `k` (B, S, K, E) as (K, E, T), multiplied by `Scores.key_factor`, in the dtype of scores."""
    keys: Tensor = k.flatten(0, 1).permute(1, 2, 0).to(wide(k.dtype)).contiguous()
    return keys * scores.key_factor(k.shape[-1])


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: list[int],
    window: int,
    sinks: Tensor | None = None,
    *score_options: Any,
) -> tuple[Tensor, ...]:
    return *fake_grads(grad, q, k, v), q.new_empty(0, dtype=wide(q.dtype)) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.cu_seqlens, ctx.window, sinks = inputs[:6]
    ctx.scores = inputs[6:]
    ctx.save_for_backward(*tensors, sinks)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, sinks = ctx.saved_tensors
    *input_grads, grad_sinks = _BACKWARD(grad, *tensors, ctx.cu_seqlens, ctx.window, sinks, *ctx.scores)
    return *input_grads, None, None, None if sinks is None else grad_sinks, *(None for _ in ctx.scores)


_INPUTS = f"Tensor q, Tensor k, Tensor v, int[] bounds, int window, Tensor? sinks=None, {SCORES_SCHEMA}"
# The operator in PyTorch's dispatcher.
PACKED_ATTENTION = define_op("packed_attention", f"({_INPUTS}) -> Tensor", _attention, _fake, key="CPU")
_BACKWARD = define_op(
    "packed_attention_backward",
    f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    key="CPU",
)
torch.library.register_autograd("kumi::packed_attention", _differentiate, setup_context=_save)
register_flop_formula(torch.ops.kumi.packed_attention)(attention_flops)
register_flop_formula(torch.ops.kumi.packed_attention_backward)(attention_backward_flops)
