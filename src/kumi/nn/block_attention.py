"""Attention of some queries over some keys of their rows, in parts that add up: what a ring of ranks computes.

Where the keys of a row arrive a part at a time, each part gives a result and the log-sum-exp of its scores, and two
results make one by these (Dao et al., 2022, arXiv:2205.14135; Liu et al., 2023, arXiv:2310.01889). Queries and keys
may be any positions of a row, in ascending order: of the keys at hand a query then sees a stretch, from the first of
its document and window to the last that is not ahead of it. They meet in blocks of queries, as matrix products; scores
and sums are in float32 or wider, and the backward pass computes the scores again, so nothing of size S x S is kept.

Inside, the G = H / K query heads of a key head are beside each other: N queries are (B, K, G, N, E), M keys
(B, K, M, E).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kumi.nn.dtypes import wide
from kumi.nn.scores import Scores, Tilt, uncapped

# Queries of a block, by device, and keys that its first key is rounded down to; see `kumi.nn.cpu_attention`.
BLOCK = {"cpu": 128, "cuda": 512}
UNIT = 64
# Where documents end inside a block, it is cut after a multiple of so many queries: few shapes, little for nothing.
ROUND = 32


class Hidden(NamedTuple):
    """True in `mask` (n, stop - start) where a query of a block does not see one of its keys `start` to `stop`."""

    start: int
    stop: int
    mask: Tensor


@dataclass(frozen=True)
class Block:
    """Queries `start` to `stop` of row `row`, the first at the position `place` and the others after it, over keys
    `first` to `last`; only the first `count` queries see any."""

    row: int
    place: int
    start: int
    stop: int
    count: int
    first: int
    last: int
    hidden: tuple[Hidden, ...]


class Part(NamedTuple):
    """Keys and values at hand, as the products of one direction take them: `keys` (B, K, E, M), multiplied by
    `Scores.key_factor`, in the dtype of scores, and in their own dtype `plain_keys` (B, K, M, E) and `values`
    (B, K, M, E'), which the backward pass has as (B, K, E', M). `scores` says what becomes of products; with slopes
    `tilt` and the `places` (B, M) of the keys, as it wants them, say what these add."""

    keys: Tensor
    plain_keys: Tensor
    values: Tensor
    scores: Scores
    tilt: Tilt | None
    places: Tensor


def split(x: Tensor, kv_heads: int) -> Tensor:
    """`x` (B, N, H, E) as (B, K, G, N, E), contiguous."""
    rows, length, heads, size = x.shape
    return x.reshape(rows, length, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4).contiguous()


def join(x: Tensor) -> Tensor:
    """The inverse of `split`."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def arranged(k: Tensor, v: Tensor, positions: Tensor, bounds: Sequence[int], scores: Scores, *, backward: bool) -> Part:
    """Keys `k` (B, M, K, E), at the `positions` (M,) of rows in which documents begin at `bounds`, and values `v`
    (B, M, K, E') as a part for the pass forward or `backward`."""
    keys = k.permute(0, 2, 3, 1).to(wide(k.dtype)).contiguous() * scores.key_factor(k.shape[-1])
    values = v.permute(0, 2, 3, 1).contiguous() if backward else v.transpose(1, 2)
    tilt, places = scores.tilt(keys, *k.shape[2:]), positions.expand(len(k), -1)
    if tilt is not None:
        within = places - earliest(bounds, len(k), 0)[:, positions] if tilt.stepped else places
        places = within.to(k.device)
    return Part(keys, k.transpose(1, 2), values, scores, tilt, places)


def earliest(bounds: Sequence[int], rows: int, window: int) -> Tensor:
    """The first position (B, S) that each position of `rows` rows may see; documents begin at the tokens `bounds`,
    numbered through the rows, which also end with their count; a `window` of 0 is none."""
    marks = torch.tensor(bounds)
    length = int(marks[-1]) // rows
    begins = torch.repeat_interleave(marks[:-1], marks.diff()).view(rows, length)
    first = begins - torch.arange(rows)[:, None] * length
    return torch.maximum(first, torch.arange(length) - window + 1) if window else first


def blocks(queries: Tensor, keys: Tensor, earliest: Tensor, piece: int, device: torch.device) -> tuple[Block, ...]:
    """The blocks of queries at the positions `queries` (N,) that see any of the keys at the positions `keys` (M,).

    `earliest` (B, S) is the first position that each position of a row may see, and never falls along the row. Every
    `piece` queries are neighbours. These are on the host, the blocks' masks on `device`.
    """
    first = torch.searchsorted(keys, earliest[:, queries].contiguous())
    last = torch.searchsorted(keys, queries, right=True)
    size = BLOCK[device.type]
    found: list[Block] = []
    for row in range(len(earliest)):
        for begin in range(0, len(queries), piece):
            for start in range(begin, begin + piece, size):
                stop = min(start + size, begin + piece)
                at = row, int(queries[start]), start
                found += _block(at, first[row, start:stop], last[start:stop], device)
    return tuple(found)


def _block(at: tuple[int, int, int], first: Tensor, last: Tensor, device: torch.device) -> Iterator[Block]:
    """The block of the queries that see keys `first` to `last`, each; none where they see no key. `at` are the row, the
    first query's position in it and its number."""
    row, place, start = at
    # Where a key comes after a query, both are of one piece, and the query sees itself; else all end at one key, and
    # the queries from some document on see none.
    count = int((first < last).sum())
    if not count:
        return
    size = min(-(-count // ROUND) * ROUND, len(first))
    begin, end = int(first[0]) // UNIT * UNIT, int(last[size - 1])
    # Queries that see nothing, but for the sake of the block's shape, see the last key: their results are not used.
    first, last = torch.minimum(first[:size], last[:size] - 1), last[:size]
    all_from, all_to = int(first[-1]), int(last[0])
    hidden = []
    if all_from > begin:
        early = torch.arange(begin, all_from) < first[:, None]
        hidden.append(Hidden(0, all_from - begin, early.to(device)))
    if all_to < end:
        late = torch.arange(all_to, end) >= last[:, None]
        hidden.append(Hidden(all_to - begin, end - begin, late.to(device)))
    yield Block(row, place, start, start + size, count, begin, end, tuple(hidden))


def forward(queries: Tensor, part: Part, along: tuple[Block, ...], out: Tensor, lse: Tensor) -> None:
    """Merges into `out` (B, K, G, N, E') and `lse` (B, K, G, N) what `queries` (B, K, G, N, E) see in `part`.

    Both are in the dtype of scores, 0 and -inf where nothing was seen yet.
    """
    for block in along:
        kv_heads, group = out.shape[1:3]
        probs, sums, _ = _probs(queries, part, block)
        seen = torch.bmm(probs.to(part.values.dtype), part.values[block.row, :, block.first : block.last])
        shape, rows = (kv_heads, group, block.stop - block.start), slice(block.start, block.start + block.count)
        seen = seen.to(out.dtype).view(*shape, -1)[:, :, : block.count]
        sums = sums.view(shape)[:, :, : block.count]
        before, result = lse[block.row, :, :, rows], out[block.row, :, :, rows]
        result.lerp_(seen, torch.sigmoid(sums - before)[..., None])
        torch.logaddexp(before, sums, out=before)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merges into `out` (B, K, G, N, E') and `lse` (B, K, G, N) a key whose score is that of its head in `sinks` (H,),
    and whose value is zero: all of a row's keys must be in them already."""
    score = sinks.to(lse.dtype).view(*lse.shape[1:3], 1)
    out.mul_(torch.sigmoid(lse - score)[..., None])
    torch.logaddexp(lse, score.expand_as(lse), out=lse)


def grad_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient (H,) of `sinks`, given that of the result `out`, both (B, N, H, E'), and `lse` (B, N, H), which have
    them. That of everything else is what `backward` makes of the three."""
    through = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1) * torch.exp(sinks.to(lse.dtype) - lse)
    return -through.sum((0, 1)).to(sinks.dtype)


def backward(
    queries: Tensor,
    part: Part,
    along: tuple[Block, ...],
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> None:
    """Adds to `grad_q` (B, K, G, N, E), `grad_k` (B, K, M, E) and `grad_v` (B, K, M, E') what comes through `part`.

    `grad` (B, K, G, N, E') is the gradient of the result, `delta` (B, K, G, N) its products with the result, and `lse`
    the log-sum-exp over all parts. The gradients, in the dtype of scores, lack a factor: those of queries and keys are
    still to be multiplied by `Scores.factor`.
    """
    narrow = grad.dtype
    for block in along:
        rows, keys = slice(block.start, block.stop), slice(block.first, block.last)
        own, size = block.row, block.stop - block.start
        probs, sums, tangents = _probs(queries, part, block)
        # Of the probabilities over all parts, those of this part are the share exp(sums - lse).
        share = (sums - lse[own, :, :, rows].reshape(sums.shape)).exp_()
        if block.count < size:
            share.view(-1, size)[:, block.count :] = 0.0
        grads = (_rows(grad, block) * share[..., None]).to(narrow)
        lost = _rows(delta[..., None], block) * share[..., None]
        grad_scores = torch.bmm(grads, part.values[own, :, :, keys]).to(probs.dtype).sub_(lost).mul_(probs)
        grad_scores = uncapped(grad_scores, tangents).to(narrow)
        _add_bmm(grad_v[own, :, keys], probs.to(narrow).transpose(1, 2), grads)
        _add_bmm(grad_k[own, :, keys], grad_scores.transpose(1, 2), _rows(queries, block))
        through = torch.bmm(grad_scores, part.plain_keys[own, :, keys])
        grad_q[own, :, :, rows] += through.view(*grad_q.shape[1:3], size, -1)


def _probs(queries: Tensor, part: Part, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """The probabilities (K, G * n, m) of a block's queries over its keys alone, and the log-sum-exp (K, G * n); and
    what `Scores.capped` gives besides."""
    rows = _rows(queries, block).to(part.keys.dtype)
    scores, tangents = part.scores.capped(torch.bmm(rows, part.keys[block.row, :, :, block.first : block.last]))
    size = block.stop - block.start
    each_head = scores.view(scores.shape[0], -1, size, block.last - block.first)
    if part.tilt is not None:
        # Distances from the block's first query in place of each query's own: one number less in all of its scores.
        places = part.places[block.row, block.first : block.last]
        each_head += part.tilt.of_keys(places, block.place)[:, :, None]
    for hidden in block.hidden:
        each_head[..., hidden.start : hidden.stop].masked_fill_(hidden.mask, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    # log p = score - log-sum-exp, most accurately for the largest.
    sums = scores.amax(dim=-1).sub_(probs.amax(dim=-1).log_())
    excess = None if part.tilt is None else part.tilt.of_queries(size)
    if excess is not None:
        sums.view(*each_head.shape[:3]).sub_(excess)
    return probs, sums, tangents


def _rows(x: Tensor, block: Block) -> Tensor:
    """The block's queries of `x` (B, K, G, N, E) as (K, G * n, E)."""
    return x[block.row, :, :, block.start : block.stop].flatten(1, 2)


def _add_bmm(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product to `total`, in its dtype."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)
