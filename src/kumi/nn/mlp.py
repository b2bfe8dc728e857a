"""Gated feed-forward layer (SwiGLU; Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.linear import Linear
from kumi.nn.region import WHOLE
from kumi.spec import model


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, spec: model.MLP, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.region = WHOLE
        size, bias = spec.intermediate_size, spec.bias
        self.gate_proj = Linear(hidden_size, size, bias=bias, device=device, dtype=dtype)
        self.up_proj = Linear(hidden_size, size, bias=bias, device=device, dtype=dtype)
        self.down_proj = Linear(size, hidden_size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.region.enter(x, (self.gate_proj, self.up_proj))
        return self.region.leave(gated(gate, up), self.down_proj).view(x.shape)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, keeping nothing but the two for the backward pass."""
    out: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def gated_halves(halves: Tensor) -> Tensor:
    """silu(first half) * second half of the last dim of `halves`, keeping nothing but them for the backward pass."""
    out: Tensor = _GatedHalves.apply(halves)  # type: ignore[no-untyped-call]
    return out


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Tensor) -> Tensor:
        ctx.save_for_backward(halves)
        gate, up = halves.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (halves,) = ctx.saved_tensors
        gate, up = halves.chunk(2, dim=-1)
        out = torch.empty_like(halves)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        torch.mul(F.silu(gate), grad, out=grad_up)
        return out
