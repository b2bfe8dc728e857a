"""Attention over a part of the keys, with results that can be merged. Ring attention is computed with it.

The keys of a row may arrive in parts. Each part gives a partial result and the log-sum-exp of its scores, and these are
enough to merge two results into one (Dao et al., 2022, arXiv:2205.14135; Liu et al., 2023, arXiv:2310.01889).

Queries and keys are any positions of a row, in ascending order. A query then sees one contiguous range of a part's
keys: from the start of its document or window to the last key that is not after it. The queries are processed in
blocks, by matrix products. Scores and sums are in float32 or wider. The backward pass recomputes the scores, so no
tensor of size S x S is kept.

Layout of tensors: the G = H / K query heads of a key head are adjacent. N queries are (B, K, G, N, E) and M keys are
(B, K, M, E).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kumi.nn.attention.scores import AlibiBias, Scores, softcap_backward
from kumi.nn.dtypes import wide
from kumi.spec.attention_blocks import QUERY_ALIGNMENT, QUERY_BLOCK, key_size

# Queries per block, by device. A block whose documents end early is shortened to a multiple of `QUERY_ALIGNMENT`, which
# wastes little work and gives few shapes.
QUERY_BLOCKS = {"cpu": QUERY_BLOCK, "cuda": 512}


class MaskedKeys(NamedTuple):
    """Keys of a block that some of its n queries must not see.

    `start`, `stop`: the keys, counted from the block's first key.
    `mask` (n, stop - start): True where a query must not see a key.
    """

    start: int
    stop: int
    mask: Tensor


@dataclass(frozen=True)
class Block:
    """Some consecutive queries of a row, and the keys that they attend to.

    `row`: index in the batch.
    `position`: position of the first query in its row.
    `start`, `stop`: range of the local queries.
    `num_active`: only this many of the queries, the first ones, see any key.
    `key_start`, `key_stop`: range of the local keys.
    `masked`: masks of keys that some of the queries must not see.
    """

    row: int
    position: int
    start: int
    stop: int
    num_active: int
    key_start: int
    key_stop: int
    masked: tuple[MaskedKeys, ...]


class KeyValuePart(NamedTuple):
    """Keys and values of one part, in the layouts that the matrix products of one pass need.

    `keys` (B, K, E, M): multiplied by `Scores.key_factor`, in the dtype of scores.
    `plain_keys` (B, K, M, E): the keys, not scaled, in the dtype of the input.
    `values`: (B, K, M, E') in the forward pass, (B, K, E', M) in the backward pass.
    `scores`: how products become scores.
    `alibi`: the ALiBi bias, or None.
    `positions` (B, M): positions of the keys, as the ALiBi bias counts them.
    """

    keys: Tensor
    plain_keys: Tensor
    values: Tensor
    scores: Scores
    alibi: AlibiBias | None
    positions: Tensor


def group_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Return `x` (B, N, H, E) as (B, K, G, N, E), contiguous."""
    rows, length, heads, size = x.shape
    return x.reshape(rows, length, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4).contiguous()


def ungroup_heads(x: Tensor) -> Tensor:
    """Return `x` (B, K, G, N, E) as (B, N, H, E): the inverse of `group_heads`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def key_value_part(
    k: Tensor, v: Tensor, positions: Tensor, cu_seqlens: Sequence[int], scores: Scores, *, backward: bool
) -> KeyValuePart:
    """Return keys `k` (B, M, K, E) and values `v` (B, M, K, E') as a part for the forward or the `backward` pass.

    `positions` (M,): positions of the keys in their rows.
    `cu_seqlens`: the first token of each document, counted through the batch, followed by the number of tokens.
    """
    keys = k.permute(0, 2, 3, 1).to(wide(k.dtype)).contiguous() * scores.key_factor(k.shape[-1])
    values = v.permute(0, 2, 3, 1).contiguous() if backward else v.transpose(1, 2)
    alibi, key_positions = scores.alibi_bias(keys, *k.shape[2:]), positions.expand(len(k), -1)
    if alibi is not None:
        # A bias is rounded to bfloat16 from positions within the document, as in transformers; else only differences of
        # positions count.
        in_document = (
            key_positions - first_visible(cu_seqlens, len(k), 0)[:, positions] if alibi.bf16_bias else key_positions
        )
        key_positions = in_document.to(k.device)
    return KeyValuePart(keys, k.transpose(1, 2), values, scores, alibi, key_positions)


def first_visible(cu_seqlens: Sequence[int], rows: int, window: int) -> Tensor:
    """Return the first position (B, S) that each position of `rows` rows may see.

    `cu_seqlens`: the first token of each document, counted through the batch, followed by the number of tokens.
    `window`: number of latest keys that a position sees; 0 for no limit.
    """
    boundaries = torch.tensor(cu_seqlens)
    length = int(boundaries[-1]) // rows
    begins = torch.repeat_interleave(boundaries[:-1], boundaries.diff()).view(rows, length)
    first = begins - torch.arange(rows)[:, None] * length
    return torch.maximum(first, torch.arange(length) - window + 1) if window else first


def query_blocks(
    queries: Tensor, keys: Tensor, earliest: Tensor, piece: int, device: torch.device
) -> tuple[Block, ...]:
    """Return the blocks of queries at positions `queries` (N,) that see any key at positions `keys` (M,).

    `earliest` (B, S): the first position that each position sees; it must not decrease along a row.
    `piece`: the queries are runs of this many neighbouring positions.
    `device`: device of the blocks' masks. The other arguments are on the CPU.
    """
    first = torch.searchsorted(keys, earliest[:, queries].contiguous())
    last = torch.searchsorted(keys, queries, right=True)
    size = QUERY_BLOCKS[device.type]
    result: list[Block] = []
    for row in range(len(earliest)):
        for begin in range(0, len(queries), piece):
            for start in range(begin, begin + piece, size):
                stop = min(start + size, begin + piece)
                origin = row, int(queries[start]), start
                result += _block(origin, first[row, start:stop], last[start:stop], len(keys), device)
    return tuple(result)


def _block(
    origin: tuple[int, int, int], first: Tensor, last: Tensor, num_keys: int, device: torch.device
) -> Iterator[Block]:
    """Yield the block of queries that see the keys from `first` (n,) to `last` (n,), or nothing if they see no key.

    `origin`: the row, the position of the first query in it, and the index of that query.
    `num_keys`: keys of the part.
    """
    row, position, start = origin
    # The queries that see a key come first. A part has the keys of one piece of the row, the queries are of one piece,
    # too. If it is the same piece, every query sees its own key. Else all keys are earlier than the queries, so that
    # the last visible key is the same for all, and only the queries of the document that reaches back to these keys see
    # one.
    num_active = int((first < last).sum())
    if not num_active:
        return
    size = min(-(-num_active // QUERY_ALIGNMENT) * QUERY_ALIGNMENT, len(first))
    # Round the number of keys up to one of few sizes, by keys before the visible ones, or at the part's begin after
    # them.
    keys = key_size(int(last[size - 1]) - int(first[0]))
    begin = max(0, int(last[size - 1]) - keys)
    end = min(begin + keys, num_keys)
    # Let the queries that see no key, but fill the block up to its size, see the last key. Their results are not used.
    first, last = torch.minimum(first[:size], last[:size] - 1), last[:size]
    seen_by_all_from, seen_by_all_to = int(first[-1]), int(last[0])
    masked = []
    if seen_by_all_from > begin:
        early = torch.arange(begin, seen_by_all_from) < first[:, None]
        masked.append(MaskedKeys(0, seen_by_all_from - begin, early.to(device)))
    if seen_by_all_to < end:
        late = torch.arange(seen_by_all_to, end) >= last[:, None]
        masked.append(MaskedKeys(seen_by_all_to - begin, end - begin, late.to(device)))
    yield Block(row, position, start, start + size, num_active, begin, end, tuple(masked))


def attend_blocks(queries: Tensor, part: KeyValuePart, plan: tuple[Block, ...], out: Tensor, lse: Tensor) -> None:
    """Merge the attention of `queries` (B, K, G, N, E) over `part` into `out` (B, K, G, N, E') and `lse` (B, K, G, N).

    `plan`: the result of `query_blocks`. `out` and `lse` are in the dtype of scores; they start as 0 and -inf.
    """
    for block in plan:
        kv_heads, group = out.shape[1:3]
        probs, partial_lse, _ = _probs(queries, part, block)
        partial = torch.bmm(probs.to(part.values.dtype), part.values[block.row, :, block.key_start : block.key_stop])
        shape, rows = (kv_heads, group, block.stop - block.start), slice(block.start, block.start + block.num_active)
        partial = partial.to(out.dtype).view(*shape, -1)[:, :, : block.num_active]
        partial_lse = partial_lse.view(shape)[:, :, : block.num_active]
        old_lse, old_out = lse[block.row, :, :, rows], out[block.row, :, :, rows]
        old_out.lerp_(partial, torch.sigmoid(partial_lse - old_lse)[..., None])
        torch.logaddexp(old_lse, partial_lse, out=old_lse)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merge the sinks into `out` (B, K, G, N, E') and `lse` (B, K, G, N), after all keys of the row.

    A sink is a key with a zero value and the score of its head in `sinks` (H,).
    """
    score = sinks.to(lse.dtype).view(*lse.shape[1:3], 1)
    out.mul_(torch.sigmoid(lse - score)[..., None])
    torch.logaddexp(lse, score.expand_as(lse), out=lse)


def grad_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient (H,) of `sinks`.

    `grad`, `out` (B, N, H, E'): gradient of the result, and the result.
    `lse` (B, N, H): log-sum-exp of the result.

    All three include the sinks. With the same three, `attend_blocks_backward` gives the gradients of queries, keys and
    values.
    """
    dot = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1) * torch.exp(sinks.to(lse.dtype) - lse)
    return -dot.sum((0, 1)).to(sinks.dtype)


def attend_blocks_backward(
    queries: Tensor,
    part: KeyValuePart,
    plan: tuple[Block, ...],
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Add the gradients through `part` to `grad_q` (B, K, G, N, E), `grad_k` (B, K, M, E) and `grad_v` (B, K, M, E').

    `grad` (B, K, G, N, E'): gradient of the result.
    `delta` (B, K, G, N): dot product of `grad` and the result.
    `lse` (B, K, G, N): log-sum-exp over all parts.
    `plan`: the result of `query_blocks`.

    The accumulated gradients are in the dtype of scores. The caller still has to multiply the gradients of queries and
    keys by `Scores.factor`.
    """
    input_dtype = grad.dtype
    for block in plan:
        rows, keys = slice(block.start, block.stop), slice(block.key_start, block.key_stop)
        row, size = block.row, block.stop - block.start
        probs, part_lse, tanh = _probs(queries, part, block)
        # Probabilities within this part become probabilities over all parts by the factor exp(part_lse - lse).
        weight_of_part = (part_lse - lse[row, :, :, rows].reshape(part_lse.shape)).exp_()
        if block.num_active < size:
            weight_of_part.view(-1, size)[:, block.num_active :] = 0.0
        grads = (_rows(grad, block) * weight_of_part[..., None]).to(input_dtype)
        weighted_delta = _rows(delta[..., None], block) * weight_of_part[..., None]
        grad_scores = torch.bmm(grads, part.values[row, :, :, keys]).to(probs.dtype).sub_(weighted_delta).mul_(probs)
        grad_scores = softcap_backward(grad_scores, tanh).to(input_dtype)
        _add_bmm(grad_v[row, :, keys], probs.to(input_dtype).transpose(1, 2), grads)
        _add_bmm(grad_k[row, :, keys], grad_scores.transpose(1, 2), _rows(queries, block))
        through = torch.bmm(grad_scores, part.plain_keys[row, :, keys])
        grad_q[row, :, :, rows] += through.view(*grad_q.shape[1:3], size, -1)


def _probs(queries: Tensor, part: KeyValuePart, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the probabilities of a block's queries over its keys, their log-sum-exp, and the tanh of the softcap.

    The shapes are (K, G * n, m), (K, G * n), and (K, G * n, m); the last is None without softcap.
    """
    rows = _rows(queries, block).to(part.keys.dtype)
    scores, tanh = part.scores.apply_softcap(
        torch.bmm(rows, part.keys[block.row, :, :, block.key_start : block.key_stop])
    )
    num_queries = block.stop - block.start
    each_head = scores.view(scores.shape[0], -1, num_queries, block.key_stop - block.key_start)
    if part.alibi is not None:
        # Measure distances from the block's first query: all scores of a query shift by the same number.
        key_positions = part.positions[block.row, block.key_start : block.key_stop]
        each_head += part.alibi.key_bias(key_positions, block.position)[:, :, None]
    for masked in block.masked:
        each_head[..., masked.start : masked.stop].masked_fill_(masked.mask, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    # log-sum-exp = score - log p; the largest score gives it most accurately.
    lse = scores.amax(dim=-1).sub_(probs.amax(dim=-1).log_())
    excess = None if part.alibi is None else part.alibi.query_excess(num_queries)
    if excess is not None:
        lse.view(*each_head.shape[:3]).sub_(excess)
    return probs, lse, tanh


def _rows(x: Tensor, block: Block) -> Tensor:
    """Return the block's queries of `x` (B, K, G, N, E) as (K, G * n, E)."""
    return x[block.row, :, :, block.start : block.stop].flatten(1, 2)


def _add_bmm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the batched product of `left` and `right` to `total`, in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)
