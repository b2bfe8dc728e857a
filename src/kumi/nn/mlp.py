"""Feed-forward layer, plain or gated (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kumi.nn.activations import activate, gate_by, joined
from kumi.nn.linear import Linear
from kumi.nn.region import WHOLE
from kumi.spec import model


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) or, not gated, down(act(up(x)))."""

    def __init__(self, hidden_size: int, spec: model.MLP, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.region = spec, WHOLE
        self.how = gate_by(spec.hidden_act)
        size, options = spec.intermediate_size, dict[str, Any](bias=spec.bias, device=device, dtype=dtype)
        self.gate_proj = Linear(hidden_size, size, **options) if spec.gated else None
        self.up_proj = Linear(hidden_size, size, **options)
        self.down_proj = Linear(size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Of the hidden states `x` (.., D), in the same shape."""
        if self.gate_proj is not None:
            gate, up = self.region.enter(x, (self.gate_proj, self.up_proj))
            inner = joined(gate, up, self.how)
        else:
            (up,) = self.region.enter(x, (self.up_proj,))
            inner = activate(up, self.spec.hidden_act)
        return self.region.leave(inner, self.down_proj).view(x.shape)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, keeping nothing but the two for the backward pass."""
    return joined(gate, up, gate_by("silu"))
