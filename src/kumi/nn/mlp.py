"""Gated feed-forward layer (SwiGLU; Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.linear import Linear
from kumi.spec import model


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, spec: model.MLP, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        size, bias = spec.intermediate_size, spec.bias
        self.gate_proj = Linear(hidden_size, size, bias=bias, device=device, dtype=dtype)
        self.up_proj = Linear(hidden_size, size, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(size, hidden_size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
