"""Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434): keys and values of all heads from one vector."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kumi.nn import rope
from kumi.nn.linear import Linear
from kumi.nn.norm import RMSNorm
from kumi.nn.region import WHOLE
from kumi.nn.where import Where, rotary
from kumi.spec import model

# transformers' norms of the latents have this, whatever the model's other norms have.
_EPS = 1e-6


class LatentAttention(nn.Module):
    """Projections to the latents and from them to heads, rotation of a part of each, attention, output projection."""

    def __init__(
        self, hidden_size: int, spec: model.LatentAttention, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec, self.region = spec, WHOLE
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

    def forward(self, x: Tensor, where: Where) -> Tensor:
        """Of the hidden states `x` (B, S, D), or (B * S, D), in the same shape."""
        spec, plain = self.spec, self.spec.qk_nope_head_dim
        q = self.queries(x).view(*where.shape, -1, spec.qk_head_dim)
        made = self.kv_a_proj_with_mqa(x)
        latent, turned_key = torch.split(made, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        (kv,) = self.region.enter(self.kv_a_layernorm(latent), (self.kv_b_proj,))
        kv = kv.view(*where.shape, -1, plain + spec.v_head_dim)
        key, value = torch.split(kv, [plain, spec.v_head_dim], dim=-1)
        turned_key = self.turn(self.region.share(turned_key).reshape(*where.shape, 1, -1), where).expand(
            -1, -1, key.shape[2], -1
        )
        q = torch.cat((q[..., :plain], self.turn(q[..., plain:], where)), dim=-1)
        if spec.score_scale != 1.0:
            q = q * spec.score_scale
        # A copy of the values, so that the projection that has them beside the keys is not kept.
        out = where.attend(q, torch.cat((key, turned_key), dim=-1), value.contiguous(), None)
        return self.region.leave(out.flatten(2), self.o_proj).view(x.shape)

    def queries(self, x: Tensor) -> Tensor:
        """The queries of all heads beside each other."""
        if self.spec.q_lora_rank is None:
            return self.region.enter(x, (self.q_proj,))[0]
        return self.region.enter(self.q_a_layernorm(self.q_a_proj(x)), (self.q_b_proj,))[0]

    def turn(self, x: Tensor, where: Where) -> Tensor:
        """The rotation of `x` (B, S, heads, R); neighbours that are turned together end half of R apart."""
        turn = rotary(self.spec)
        assert turn is not None
        if self.spec.rope_interleave:
            x = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return rope.rotate(x, *where.tables[turn])
