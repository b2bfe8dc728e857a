"""Causal attention over packed documents with softcap or ALiBi in a compiled layer, by FlexAttention.

PyTorch's compiler makes one kernel of the products, the change of the scores and the mask (Dong et al., 2024,
arXiv:2412.05496). Uncompiled, FlexAttention would hold all S x S scores, so `kumi.nn.attention.chunked_attention`
computes the attention of uncompiled layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kumi.accelerator import is_gpu
from kumi.nn.attention.attention_context import AttentionFn, MakeAttention, Segments
from kumi.nn.attention.scores import Scores

# The smallest head size of FlexAttention's kernels.
SMALLEST_HEAD = 16


def supports_flex(q: Tensor, scores: Scores) -> bool:
    """Return True if FlexAttention should compute `scores` of queries `q` (B, S, H, E): in a compiled layer, without
    the rounded bias of `Scores.bf16_bias`."""
    return torch.compiler.is_compiling() and not scores.bf16_bias and q.shape[-1] >= SMALLEST_HEAD


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, scores: Scores) -> Tensor:
    """Return causal attention (B, S, H, E') of `q` (B, S, H, E) over `k` (B, S, K, E) and `v` (B, S, K, E').

    `mask`: a result of `block_mask`.
    """
    from torch.nn.attention.flex_attention import flex_attention as compute

    queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
    options: dict[str, Any] = {"block_mask": mask, "scale": scores.scale, "enable_gqa": q.shape[2] != k.shape[2]}
    out = compute(queries, keys, values, _score_function(scores, q.device), **options)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def with_block_masks(make_attention: MakeAttention, windows: Iterable[int | None]) -> MakeAttention:
    """Return `make_attention` for unsharded rows, whose `Segments` have the masks of layers with these `windows`.

    A compiled layer that is recomputed cannot make the masks itself.
    """
    return partial(_make_with_masks, make_attention, tuple(windows))


def _make_with_masks(
    make_attention: MakeAttention,
    windows: tuple[int | None, ...],
    tokens: Tensor,
    document_ids: Tensor | None,
    cu_seqlens: Sequence[int] | None = None,
) -> AttentionFn:
    attention = make_attention(tokens, document_ids, cu_seqlens)
    assert isinstance(attention, partial)
    (segments,) = attention.args
    assert isinstance(segments, Segments)
    masks = {window: block_mask(tokens, document_ids, window) for window in windows}
    return partial(attention.func, replace(segments, block_masks=masks))


def block_mask(tokens: Tensor, document_ids: Tensor | None, window: int | None) -> Any:
    """Return FlexAttention's mask of a batch: which blocks of keys the queries see.

    Only the shape and the device of `tokens` (B, S) are used. `document_ids` (B, S): changes at each document boundary
    within a row; None if every row is one document. `window`: a query sees at most this many latest keys, or None.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    # Uncompiled, the mask of all S x S pairs would be in memory.
    make: Any = torch.compile(create_block_mask) if is_gpu(tokens.device) else create_block_mask
    rows = None if document_ids is None else len(tokens)
    sees = partial(_sees, document_ids, window)
    return make(sees, rows, None, tokens.shape[1], tokens.shape[1], device=str(tokens.device))


def _sees(
    document_ids: Tensor | None, window: int | None, row: Tensor, head: Tensor, query: Tensor, key: Tensor
) -> Any:
    seen = query >= key
    if window is not None:
        seen = seen & (query - key < window)
    return seen if document_ids is None else seen & (document_ids[row, query] == document_ids[row, key])


def _score_function(scores: Scores, device: torch.device) -> Callable[..., Tensor]:
    """Return the function of one score that applies softcap and ALiBi to it."""
    slopes = None if scores.slopes is None else torch.tensor(scores.slopes, device=device)

    def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if scores.softcap is not None:
            score = torch.tanh(score / scores.softcap) * scores.softcap
        return score if slopes is None else score - slopes[head] * (query - key)

    return change
