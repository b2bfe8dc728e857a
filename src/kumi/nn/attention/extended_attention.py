"""Attention of several new tokens of one sequence over its earlier tokens and themselves, for generation.

The new tokens of a turn of a conversation attend to the cache of the turns before. Queries are processed in blocks, so
that the mask and the scores of a block stay small. No gradients.

Letters: T new tokens, L keys (those of the new tokens are the last), K key heads, G query heads per key head,
H = K x G heads, E dims of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.nn.dtypes import wide

# Scores of all heads in memory at a time.
_SCORES_AT_ONCE = 2**24


class _Block(NamedTuple):
    """Queries `start` to `stop`, which see no keys but `first` to `last`.

    `visible` (stop - start, last - first): True where a query sees a key.
    """

    start: int
    stop: int
    first: int
    last: int
    visible: Tensor


def extended_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    window: int | None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Return causal attention (T, H, E') of `q` (T, H, E) over `keys` (K, L, E) and `values` (K, L, E').

    The keys are at the consecutive positions from `first`, the queries at the last T of them. `window`, `sinks` and
    `scores` are those of `kumi.nn.attention.attention_context.AttentionFn`.
    """
    heads, out = keys.shape[0], q.new_empty(*q.shape[:2], values.shape[2])
    for block in _blocks(len(q), keys.shape[1], q.shape[1], window, q.device):
        part = q[block.start : block.stop]
        count, size = len(part), q.shape[2]
        # (K, G, t, E)
        queries = part.view(count, heads, -1, size).permute(1, 2, 0, 3)
        seen = keys[:, block.first : block.last], values[:, block.first : block.last]
        if sinks is None and scores.fused:
            result = _fused(queries, *seen, block.visible, scores.scale)
        else:
            result = _by_scores(queries, *seen, block.visible, first + block.first, sinks, scores)
        out[block.start : block.stop] = result.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def extended_latent_attention(q: Tensor, latents: Tensor, up: Tensor, nope_size: int) -> Tensor:
    """Return causal attention (T, H, E') of `q` (T, H, nope_size + R) over `latents` (L, rank + R).

    It is computed in the space of the latents. The last R dims of queries and latents are rotated.
    `up` (H, nope_size + E', rank): the projection from latents to keys and values.
    """
    rank, out = up.shape[2], q.new_empty(*q.shape[:2], up.shape[1] - nope_size)
    queries = torch.einsum("the,hed->thd", q[..., :nope_size], up[:, :nope_size])
    queries = torch.cat((queries, q[..., nope_size:]), dim=-1)
    for block in _blocks(len(q), len(latents), q.shape[1], None, q.device):
        seen = latents[: block.last]
        products = torch.matmul(queries[block.start : block.stop], seen.T).to(wide(q.dtype))
        scaled = (products * q.shape[-1] ** -0.5).masked_fill_(~block.visible[:, None], -torch.inf)
        sums = torch.matmul(scaled.softmax(-1).to(q.dtype), seen[:, :rank])
        out[block.start : block.stop] = torch.einsum("thd,hed->the", sums, up[:, nope_size:])
    return out


def _blocks(queries: int, keys: int, heads: int, window: int | None, device: torch.device) -> Iterator[_Block]:
    size, before = max(1, _SCORES_AT_ONCE // (heads * keys)), keys - queries
    for start in range(0, queries, size):
        stop = min(queries, start + size)
        first, last = 0 if window is None else max(0, before + start - window + 1), before + stop
        own = torch.arange(before + start, last, device=device)[:, None]
        distance = own - torch.arange(first, last, device=device)
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        yield _Block(start, stop, first, last, visible)


def _fused(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    """Return attention (K, G, t, E') of `queries` (K, G, t, E), whose G heads become rows of their key head."""
    groups = queries.shape[1]
    mask = torch.zeros(visible.shape, dtype=queries.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    rows = queries.flatten(1, 2)[None]
    out = F.scaled_dot_product_attention(
        rows, keys[None], values[None], attn_mask=mask.repeat(groups, 1)[None, None], scale=scale
    )
    return out[0].view(queries.shape[0], groups, -1, values.shape[2])


def _by_scores(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, first: int, sinks: Tensor | None, scores: Scores
) -> Tensor:
    """Return the result of `_fused` with scores that no kernel of PyTorch computes; key 0 is at position `first`."""
    dtype, size = wide(queries.dtype), queries.shape[3]
    logits = torch.matmul(queries.to(dtype), keys.to(dtype)[:, None].transpose(-1, -2)) * scores.factor(size)
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    alibi = scores.alibi_bias(logits, len(keys), size)
    if alibi is not None:
        positions = torch.arange(first, first + keys.shape[1], device=logits.device)
        logits = logits + alibi.key_bias(positions, 0)[:, :, None]
        if not alibi.bf16_bias:
            logits = logits - alibi.slopes[..., None] * positions[-queries.shape[2] :, None]
    logits = logits.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype).view(len(keys), -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[1]]
    return torch.matmul(weights.to(values.dtype), values[:, None])
