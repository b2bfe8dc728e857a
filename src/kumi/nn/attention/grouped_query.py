"""Causal grouped-query attention over rows that may hold several documents."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.compat import has_varlen, varlen_attention
from kumi.nn import rope
from kumi.nn.attention import cpu_flash, flash_partial, flex
from kumi.nn.attention.attention_context import AttentionContext, Segments, key_rotary, positions, rotary, visible
from kumi.nn.attention.chunked_attention import chunked_attention
from kumi.nn.attention.cpu_attention import packed_attention
from kumi.nn.attention.scores import PLAIN_SCORES, Scores, alibi_slopes
from kumi.nn.dtypes import wide
from kumi.nn.linear import Linear
from kumi.nn.norm import RMSNorm
from kumi.nn.tp_block import UNSHARDED
from kumi.nn.wrappers import Wrapper, wrap
from kumi.spec import model


class Attention(nn.Module):
    """Projections, optional query and key norms, rotation, attention, output projection."""

    def __init__(
        self,
        hidden_size: int,
        spec: model.Attention,
        eps: float,
        *,
        device: torch.device | None,
        dtype: torch.dtype,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.projections = spec, UNSHARDED
        self.wrappers: list[Wrapper] = []
        q_size, kv_size = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(hidden_size, q_size, bias=spec.qkv_bias, device=device, dtype=dtype)
        self.k_proj = Linear(hidden_size, kv_size, bias=spec.qkv_bias, device=device, dtype=dtype)
        self.v_proj = Linear(hidden_size, kv_size, bias=spec.qkv_bias, device=device, dtype=dtype)
        self.o_proj = Linear(q_size, hidden_size, bias=spec.out_bias, device=device, dtype=dtype)
        sizes = (q_size, kv_size) if spec.qk_norm_whole else (spec.head_dim, spec.head_dim)
        norm = partial(RMSNorm, eps=eps, device=device, dtype=dtype, zero_centered=zero_centered)
        self.q_norm = norm(sizes[0]) if spec.qk_norm else None
        self.k_norm = norm(sizes[1]) if spec.qk_norm else None
        count = spec.num_attention_heads
        self.sinks = nn.Parameter(torch.empty(count, device=device, dtype=dtype)) if spec.sinks else None

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the result of `compute`, called inside the wrappers in `wrappers`."""
        out: Tensor = wrap(self.wrappers, self.compute)(x, context)
        return out

    def compute(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the attention output for hidden states `x` (B, S, D) or (B * S, D), in the same shape."""
        heads = (*context.shape, -1, self.spec.head_dim)
        q, k, v = self.projections.column_linear(x, (self.q_proj, self.k_proj, self.v_proj))
        v = v.view(heads)
        if not self.spec.qk_norm_whole:
            q, k = q.view(heads), k.view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).view(heads), self.k_norm(k).view(heads)
        rotation = rotary(self.spec)
        if rotation is not None:
            key_rotation = key_rotary(rotation)
            if key_rotation == rotation and q.shape[1] == 1:  # decoding, where an operator costs more than its work
                together = rope.rotate(
                    torch.cat((q, k), 2), *context.cos_sin[rotation], interleave=rotation[0].interleave
                )
                q, k = together.split_with_sizes((q.shape[2], k.shape[2]), 2)
            else:
                pairs = ((q, rotation), (k, key_rotation))
                q, k = (rope.rotate(x, *context.cos_sin[key], interleave=rotation[0].interleave) for x, key in pairs)
        out = context.attend(q, k, v, self.spec.sliding_window, self.sinks, self.scores)
        return self.projections.row_linear(out.flatten(2), self.o_proj).view(x.shape)

    @property
    def scores(self) -> Scores:
        """How the products of this rank's heads become scores."""
        slopes = alibi_slopes(self.spec.num_attention_heads) if self.spec.alibi else None
        all_heads = Scores(self.spec.score_scale, self.spec.softcap, slopes, self.spec.alibi_stepped)
        return all_heads.part(*self.projections.rank_and_size)


def attend(
    segments: Segments,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Return causal attention (B, S, H, E') of `q` (B, S, H, E) over `k` (B, S, K, E) and `v` (B, S, K, E').

    A position sees the earlier positions of its document, and itself.
    `window`: a query sees at most this many latest keys; None for no limit.
    `sinks` (H,): one more score per head in the softmax, as of a key with a zero value.
    `scores`: how the product of a query and a key becomes a score.
    """
    if isinstance(segments.cu_seqlens, list):
        if sinks is None and scores.fused and cpu_flash.prefers_flash(q, v, segments.cu_seqlens, window):
            return cpu_flash.flash_attention(q, k, v, segments.cu_seqlens, scores.scale)
        return packed_attention(q, k, v, segments.cu_seqlens, window, sinks, scores)
    if sinks is not None or not scores.fused:
        return _attend_with_custom_scores(segments, q, k, v, window, sinks, scores)
    only_causal = segments.document_ids is None and (window is None or window >= q.shape[1])
    if not only_causal and segments.cu_seqlens is not None and flash_partial.supports_packed(q, v):
        return _attend_packed(segments.cu_seqlens, q, k, v, window, scores)
    value_size, flash = v.shape[3], has_varlen(q)
    if flash and value_size < q.shape[3]:
        # Flash kernels need the same head size for keys and values: pad the values with zeros to the size of the keys.
        v = F.pad(v, (0, q.shape[3] - value_size))
    mask = None if only_causal else segments.mask(q.shape[1], window, q.dtype, q.device)
    if not only_causal or not flash:
        # With a mask or without flash attention, and with fewer key heads than query heads, every kernel of a GPU would
        # hold all S x S scores.
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # Ask for grouped queries only if needed: some kernels support only as many key heads as query heads.
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=only_causal, scale=scores.scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)[..., :value_size]


def _attend_packed(cu_seqlens: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None, scores: Scores) -> Tensor:
    """Return the result of `attend` by the variable-length kernel, which needs one head size, a multiple of 8."""
    size, value_size = q.shape[3], v.shape[3]
    padded = flash_partial.kernel_head_size(size)
    # Zeros at the end of queries and keys change no product, but they would change the default scale.
    scale = scores.scale if padded == size else scores.factor(size)
    tokens = [flash_partial.padded_heads(x, padded).flatten(0, 1) for x in (q, k, v)]
    out = varlen_attention(tokens[0], tokens[1], tokens[2], cu_seqlens, longest=q.shape[1], window=window, scale=scale)
    return out.view(*q.shape[:3], padded)[..., :value_size]


def _attend_with_custom_scores(
    segments: Segments, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None, scores: Scores
) -> Tensor:
    """Return the result of `attend` for sinks, softcaps or ALiBi, which no PyTorch kernel computes."""
    cu_seqlens = segments.cu_seqlens
    if isinstance(cu_seqlens, Tensor) and sinks is not None and scores.fused and flash_partial.supports_flash(q, v):
        return flash_partial.flash_with_sinks(q, k, v, window, sinks, cu_seqlens, scores.scale)
    if window in segments.block_masks and sinks is None and flex.supports_flex(q, scores):
        return flex.flex_attention(q, k, v, segments.block_masks[window], scores)
    if cu_seqlens is not None:
        return chunked_attention(q, k, v, segments.cu_seqlens_list, window, sinks, scores)
    return _attend_by_all_scores(segments.document_ids, q, k, v, window, sinks, scores)


def _attend_by_all_scores(
    document_ids: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    sinks: Tensor | None,
    scores: Scores,
) -> Tensor:
    """Return the result of `attend` by element-wise operators, for any device. All S x S scores are in memory."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    logits = torch.einsum("bshe,bthe->bhst", q.to(wide(q.dtype)), k.to(wide(q.dtype))) * scores.factor(q.shape[3])
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    alibi = scores.alibi_bias(logits, logits.shape[1], q.shape[3])
    if alibi is not None:
        index = positions(q[..., 0, 0], document_ids) if alibi.bf16_bias else torch.arange(q.shape[1], device=q.device)
        logits = logits + torch.stack([alibi.key_bias(row, 0) for row in index.expand(len(q), -1)])[:, :, 0, None]
        excess = alibi.query_excess(q.shape[1])
        logits = logits if excess is None else logits - excess[:, 0, :, None]
    logits = logits.masked_fill(~visible(document_ids, q.shape[1], window, q.device), -torch.inf)
    if sinks is not None:
        column = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : q.shape[1]]
    return torch.einsum("bhst,bthe->bshe", weights.to(v.dtype), v)
