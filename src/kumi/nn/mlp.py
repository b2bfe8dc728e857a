"""The feed-forward layer, plain or gated (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kumi.nn.activation_functions import activate, apply_gate, gate_by
from kumi.nn.linear import Linear
from kumi.nn.tp_block import UNSHARDED
from kumi.spec import model


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if not gated. `function` computes it and can be replaced."""

    def __init__(self, hidden_size: int, spec: model.MLP, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.projections = spec, UNSHARDED
        self.how = gate_by(spec.hidden_act)
        size, options = spec.intermediate_size, dict[str, Any](bias=spec.bias, device=device, dtype=dtype)
        self.gate_proj = Linear(hidden_size, size, **options) if spec.gated else None
        self.up_proj = Linear(hidden_size, size, **options)
        self.down_proj = Linear(size, hidden_size, **options)
        self.function: Callable[[MLP, Tensor], Tensor] = compute_mlp

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output for hidden states `x` (.., D), in the same shape."""
        return self.function(self, x)


def compute_mlp(mlp: MLP, x: Tensor) -> Tensor:
    """Return the output of `mlp` for hidden states `x` (.., D), in the same shape, without tiling."""
    if mlp.gate_proj is not None:
        gate, up = mlp.projections.column_linear(x, (mlp.gate_proj, mlp.up_proj))
        inner = apply_gate(gate, up, mlp.how)
    else:
        (up,) = mlp.projections.column_linear(x, (mlp.up_proj,))
        inner = activate(up, mlp.spec.hidden_act)
    return mlp.projections.row_linear(inner, mlp.down_proj).view(x.shape)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. Only the two inputs are kept for the backward pass."""
    return apply_gate(gate, up, gate_by("silu"))
