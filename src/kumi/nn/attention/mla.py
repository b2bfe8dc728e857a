"""Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434): keys and values of all heads are computed from one
latent vector per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kumi.nn import rope
from kumi.nn.attention.attention_context import AttentionContext, rotary
from kumi.nn.linear import Linear
from kumi.nn.norm import RMSNorm
from kumi.nn.tp_block import UNSHARDED
from kumi.spec import model

# The epsilon of the latents' norms in transformers, independent of the model's other norms.
_EPS = 1e-6


class LatentAttention(nn.Module):
    """Projections to the latents and from them to heads, rotation of a part of each head, attention, projection."""

    def __init__(
        self, hidden_size: int, spec: model.LatentAttention, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec, self.projections = spec, UNSHARDED
        heads, rank = spec.num_attention_heads, spec.q_lora_rank
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if rank is None:
            self.q_proj = Linear(hidden_size, heads * spec.qk_head_dim, bias=False, **options)
        else:
            self.q_a_proj = Linear(hidden_size, rank, bias=spec.bias, **options)
            self.q_a_layernorm = RMSNorm(rank, _EPS, **options)
            self.q_b_proj = Linear(rank, heads * spec.qk_head_dim, bias=False, **options)
        latent = spec.kv_lora_rank
        self.kv_a_proj_with_mqa = Linear(hidden_size, latent + spec.qk_rope_head_dim, bias=spec.bias, **options)
        self.kv_a_layernorm = RMSNorm(latent, _EPS, **options)
        self.kv_b_proj = Linear(latent, heads * (spec.qk_nope_head_dim + spec.v_head_dim), bias=False, **options)
        self.o_proj = Linear(heads * spec.v_head_dim, hidden_size, bias=spec.bias, **options)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the attention output for hidden states `x` (B, S, D) or (B * S, D), in the same shape."""
        spec, nope_size = self.spec, self.spec.qk_nope_head_dim
        q = self.queries(x).view(*context.shape, -1, spec.qk_head_dim)
        latent_and_key = self.kv_a_proj_with_mqa(x)
        latent, rotated_key = torch.split(latent_and_key, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        rotated_key = self.rotate(self.projections.broadcast(rotated_key).reshape(*context.shape, 1, -1), context)
        q = torch.cat((q[..., :nope_size], self.rotate(q[..., nope_size:], context)), dim=-1)
        if spec.score_scale != 1.0:
            q = q * spec.score_scale
        memory = context.latents
        if memory is not None:
            memory.store(self.projections.broadcast(latent).reshape(*context.shape, -1), rotated_key[:, :, 0])
        if memory is not None and memory.attends:
            out = memory.attend(q, self.up_projection, nope_size)
        else:
            out = self.attend_by_heads(q, latent, rotated_key, context)
        return self.projections.row_linear(out.flatten(2), self.o_proj).view(x.shape)

    def attend_by_heads(self, q: Tensor, latent: Tensor, rotated_key: Tensor, context: AttentionContext) -> Tensor:
        """Return attention (B, S, H, E') over keys and values of every head, which are computed from the latents."""
        nope_size, value_size = self.spec.qk_nope_head_dim, self.spec.v_head_dim
        (kv,) = self.projections.column_linear(latent, (self.kv_b_proj,))
        kv = kv.view(*context.shape, -1, nope_size + value_size)
        key, value = torch.split(kv, [nope_size, value_size], dim=-1)
        key = torch.cat((key, rotated_key.expand(-1, -1, key.shape[2], -1)), dim=-1)
        # Copy the values, so that autograd does not keep the projection that holds both keys and values.
        return context.attend(q, key, value.contiguous(), None)

    def up_projection(self) -> Tensor:
        """Return the matrix (H * (nope + E'), rank) from latents to local heads, adapters included."""
        weight = self.kv_a_layernorm.weight
        identity = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        matrix: Tensor = self.kv_b_proj(identity).T
        return matrix

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of all local heads, concatenated."""
        if self.spec.q_lora_rank is None:
            return self.projections.column_linear(x, (self.q_proj,))[0]
        return self.projections.column_linear(self.q_a_layernorm(self.q_a_proj(x)), (self.q_b_proj,))[0]

    def rotate(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return `x` (B, S, heads, R) rotated. Interleaved pairs are first moved half of R apart."""
        rotation = rotary(self.spec)
        assert rotation is not None
        if self.spec.rope_interleave:
            x = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return rope.rotate(x, *context.cos_sin[rotation])
