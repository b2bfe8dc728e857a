"""Activation functions under Hugging Face's names, with gradients computed from the inputs alone.

ACTIVATIONS[name].value(x)              the activation of x, in a new tensor
ACTIVATIONS[name].gradient(grad, x)     the gradient of x, in a new tensor
activate(x, name)                       an autograd function that keeps x (for relu, its result instead)
gate_by(name)                           the gate act(gate) * up
clamped_swiglu(limit, alpha)            the gate of gpt-oss
apply_gate(gate, up, how)               an autograd function that keeps only its two inputs
apply_gate_to_halves(halves, how)       the same, with gate and up in one tensor
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kumi.nn.traced import traced

_aten = torch.ops.aten
# The factor a of quick GELU, x * sigmoid(a x), which approximates GELU.
_QUICK = 1.702


class Activation(NamedTuple):
    """A function of one tensor, and its gradient: (grad, x) -> gradient of x."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _tanh_gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    grad_x: Tensor = _aten.gelu_backward(grad, x, approximate="tanh")
    return grad_x


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(_QUICK * x).mul_(x)


def _quick_gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    # With s = sigmoid(a x), the derivative of x s is s + x a s (1 - s).
    sigmoid = torch.sigmoid(_QUICK * x)
    return (1 - sigmoid).mul_(x).mul_(_QUICK).add_(1).mul_(sigmoid).mul_(grad)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square_()


_SILU = Activation(F.silu, _aten.silu_backward)
_GELU = Activation(F.gelu, _aten.gelu_backward)
_TANH_GELU = Activation(_tanh_gelu, _tanh_gelu_gradient)
ACTIVATIONS: dict[str, Activation] = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    # Three names of the same formula.
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "quick_gelu": Activation(_quick_gelu, _quick_gelu_gradient),
    "relu": Activation(F.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "relu2": Activation(_squared_relu, lambda grad, x: F.relu(x).mul_(2).mul_(grad)),
}


class Gate(NamedTuple):
    """A function of (gate, up), and its gradients: (grad, gate, up) -> (gradient of gate, gradient of up)."""

    value: Callable[[Tensor, Tensor], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@lru_cache(maxsize=64)
def gate_by(name: str) -> Gate:
    """Return the gate act(gate) * up with the activation `name`."""
    act = ACTIVATIONS[name]

    def gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return act.gradient(grad * up, gate), act.value(gate).mul_(grad)

    return Gate(lambda gate, up: act.value(gate).mul_(up), gradients)


@lru_cache(maxsize=64)
def clamped_swiglu(limit: float, alpha: float) -> Gate:
    """Return the gate gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within +-`limit`.

    Clamped elements get no gradient.
    """

    def value(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return torch.sigmoid(alpha * gate).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    def gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        clamped_gate, clamped_up = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(alpha * clamped_gate)
        slope = (1 - sigmoid).mul_(clamped_gate).mul_(alpha).add_(1).mul_(sigmoid)
        grad_gate = slope.mul_(clamped_up + 1).mul_(grad).masked_fill_(gate > limit, 0.0)
        grad_up = sigmoid.mul_(clamped_gate).mul_(grad).masked_fill_(up.abs() > limit, 0.0)
        return grad_gate, grad_up

    return Gate(value, gradients)


def apply_gate(gate: Tensor, up: Tensor, how: Gate) -> Tensor:
    """Return the result of the gate `how` for `gate` and `up`. Only these two are kept for the backward pass."""
    if not torch.is_grad_enabled():
        return how.value(gate, up)
    out: Tensor = _ApplyGate.apply(gate, up, how)  # type: ignore[no-untyped-call]
    return out


def apply_gate_to_halves(halves: Tensor, how: Gate) -> Tensor:
    """Return the result of the gate `how` for the two halves of the last dim of `halves`. Only `halves` is kept for the
    backward pass."""
    out: Tensor = _ApplyGateToHalves.apply(halves, how)  # type: ignore[no-untyped-call]
    return out


def activate(x: Tensor, name: str) -> Tensor:
    """Return the activation `name` of `x`. `x` is kept for the backward pass; for relu, only the result.

    relu's gradient needs only the result, and the matrix product after it keeps that anyway.
    """
    if name == "relu":
        return F.relu(x)
    out: Tensor = _Activate.apply(x, name)  # type: ignore[no-untyped-call]
    return out


class _ApplyGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, how: Gate) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.how = how
        return traced(how.value(gate, up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return (*ctx.how.gradients(grad, gate, up), None)


class _ApplyGateToHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Tensor, how: Gate) -> Tensor:
        ctx.save_for_backward(halves)
        ctx.how = how
        gate, up = halves.chunk(2, dim=-1)
        return traced(how.value(gate, up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (halves,) = ctx.saved_tensors
        gate, up = halves.chunk(2, dim=-1)
        out = torch.empty_like(halves)
        for out_half, grad_half in zip(out.chunk(2, dim=-1), ctx.how.gradients(grad, gate, up), strict=True):
            out_half.copy_(grad_half)
        return out, None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return traced(ACTIVATIONS[name].value(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ACTIVATIONS[ctx.name].gradient(grad, x), None
