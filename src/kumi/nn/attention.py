"""Causal grouped-query attention over rows that may hold several documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.compat import has_varlen, varlen_attention
from kumi.nn import rope
from kumi.nn.cpu_attention import packed_attention
from kumi.nn.linear import Linear
from kumi.nn.norm import RMSNorm
from kumi.spec import model


@dataclass(frozen=True)
class Segments:
    """Where the documents of a batch lie, worked out once and used by every layer.

    `bounds`: the tokens, numbered through the batch, at which documents begin, and their count at the end; a row begins
    one. On the CPU a list, on CUDA the int32 tensor that variable-length attention takes, elsewhere None.
    `document_ids` (B, S) has another value on each side of a boundary; it is None where a row is one document.
    """

    document_ids: Tensor | None
    bounds: list[int] | Tensor | None


def segments(input_ids: Tensor, document_ids: Tensor | None) -> Segments:
    """The segments of a batch (B, S) whose documents `document_ids` (B, S) tells apart; None: a row is a document."""
    rows, length = input_ids.shape
    if input_ids.device.type not in ("cpu", "cuda"):
        return Segments(document_ids, None)
    if document_ids is None:
        bounds = torch.arange(0, rows * length + 1, length, device=input_ids.device)
    else:
        end = torch.tensor([rows * length], device=input_ids.device)
        bounds = torch.cat([begins(document_ids).flatten().nonzero()[:, 0], end])
    return Segments(document_ids, bounds.tolist() if input_ids.device.type == "cpu" else bounds.int())


def begins(document_ids: Tensor) -> Tensor:
    """True (B, S) at the first token of every document."""
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return first


class Attention(nn.Module):
    """Projections, optional query and key norms, rotation, attention, output projection."""

    def __init__(
        self, hidden_size: int, spec: model.Attention, eps: float, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec = spec
        heads, kv_heads = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(hidden_size, heads, bias=spec.qkv_bias, device=device, dtype=dtype)
        self.k_proj = Linear(hidden_size, kv_heads, bias=spec.qkv_bias, device=device, dtype=dtype)
        self.v_proj = Linear(hidden_size, kv_heads, bias=spec.qkv_bias, device=device, dtype=dtype)
        self.o_proj = Linear(heads, hidden_size, bias=spec.out_bias, device=device, dtype=dtype)
        self.q_norm = RMSNorm(spec.head_dim, eps, device=device, dtype=dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, eps, device=device, dtype=dtype) if spec.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.spec.head_dim)
        q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        out = attend(q, k, v, segments, self.spec.sliding_window)
        projected: Tensor = self.o_proj(out.reshape(batch, length, -1))
        return projected


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None) -> Tensor:
    """Attention of `q` (B, S, H, E) over `k` and `v` (B, S, K, E), each position over its document's past."""
    if isinstance(segments.bounds, list):
        return packed_attention(q, k, v, segments.bounds, window)
    plain = segments.document_ids is None and (window is None or window >= q.shape[1])
    if not plain and segments.bounds is not None and has_varlen(q):
        tokens = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        return varlen_attention(*tokens, segments.bounds, longest=q.shape[1], window=window).view(q.shape)
    mask = None if plain else visible(segments.document_ids, q.shape[1], window, q.device)
    if not plain:
        # No kernel takes both a mask and fewer key heads without holding all S x S scores.
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=plain, enable_gqa=plain)
    return out.transpose(1, 2)


def visible(document_ids: Tensor | None, length: int, window: int | None, device: torch.device) -> Tensor:
    """True where query s may look at key t, (B or 1, 1, S, S)."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if document_ids is None:
        return seen[None, None]
    return (document_ids[:, :, None] == document_ids[:, None, :])[:, None] & seen
