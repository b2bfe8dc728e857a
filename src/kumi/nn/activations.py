"""Activation functions under Hugging Face's names, and their gradients from the inputs alone.

ACTIVATIONS[name].value(x)              what the function makes of x, in a new tensor
ACTIVATIONS[name].gradient(grad, x)     the gradient of x from that of the result, in a new tensor
activate(x, name)                       a layer of its own, which keeps x, or of relu the result
gate_by(name), clamped(limit, alpha)    a gated layer's two inputs into one
joined(gate, up, how)                   that layer, which keeps nothing but the two; joined_halves: of one tensor
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_QUICK = 1.702


class Activation(NamedTuple):
    """A function of one tensor, and its gradient: (grad, x) -> grad of x."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _tanh_gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    found: Tensor = _aten.gelu_backward(grad, x, approximate="tanh")
    return found


def _quick_gelu(x: Tensor) -> Tensor:
    return torch.sigmoid(_QUICK * x).mul_(x)


def _quick_gelu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    # With s = sigmoid(a x): d(x s) = s + x a s (1 - s).
    sigmoid = torch.sigmoid(_QUICK * x)
    return (1 - sigmoid).mul_(x).mul_(_QUICK).add_(1).mul_(sigmoid).mul_(grad)


def _squared(x: Tensor) -> Tensor:
    return F.relu(x).square_()


_SILU = Activation(F.silu, _aten.silu_backward)
_GELU = Activation(F.gelu, _aten.gelu_backward)
_TANH_GELU = Activation(_tanh_gelu, _tanh_gelu_gradient)
ACTIVATIONS: dict[str, Activation] = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    # The same formula, which its authors wrote down in several ways.
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "quick_gelu": Activation(_quick_gelu, _quick_gelu_gradient),
    "relu": Activation(F.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "relu2": Activation(_squared, lambda grad, x: F.relu(x).mul_(2).mul_(grad)),
}


class Gate(NamedTuple):
    """How two tensors become one, and the gradients of both: (grad, gate, up) -> (grad of gate, grad of up)."""

    value: Callable[[Tensor, Tensor], Tensor]
    gradients: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@lru_cache(maxsize=64)
def gate_by(name: str) -> Gate:
    """act(gate) * up with the activation `name`."""
    act = ACTIVATIONS[name]

    def gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return act.gradient(grad * up, gate), act.value(gate).mul_(grad)

    return Gate(lambda gate, up: act.value(gate).mul_(up), gradients)


@lru_cache(maxsize=64)
def clamped(limit: float, alpha: float) -> Gate:
    """gate * sigmoid(alpha * gate) * (up + 1), of a gate of at most `limit` and an up of at most that size; beyond, no
    gradient goes through."""

    def value(gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return torch.sigmoid(alpha * gate).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))

    def gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        low, inside = gate.clamp(max=limit), up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(alpha * low)
        slope = (1 - sigmoid).mul_(low).mul_(alpha).add_(1).mul_(sigmoid)
        of_gate = slope.mul_(inside + 1).mul_(grad).masked_fill_(gate > limit, 0.0)
        of_up = sigmoid.mul_(low).mul_(grad).masked_fill_(up.abs() > limit, 0.0)
        return of_gate, of_up

    return Gate(value, gradients)


def joined(gate: Tensor, up: Tensor, how: Gate) -> Tensor:
    """What `how` makes of `gate` and `up`, keeping nothing but the two for the backward pass."""
    out: Tensor = _Joined.apply(gate, up, how)  # type: ignore[no-untyped-call]
    return out


def joined_halves(halves: Tensor, how: Gate) -> Tensor:
    """What `how` makes of the two halves of the last dim of `halves`, keeping nothing but them for the backward."""
    out: Tensor = _JoinedHalves.apply(halves, how)  # type: ignore[no-untyped-call]
    return out


def activate(x: Tensor, name: str) -> Tensor:
    """The activation `name` of `x`, keeping `x` for the backward pass, or of relu, whose gradient needs no more, only
    the result, which the matrix after it keeps anyway."""
    if name == "relu":
        return F.relu(x)
    out: Tensor = _Activate.apply(x, name)  # type: ignore[no-untyped-call]
    return out


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, how: Gate) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.how = how
        return how.value(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return (*ctx.how.gradients(grad, gate, up), None)


class _JoinedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Tensor, how: Gate) -> Tensor:
        ctx.save_for_backward(halves)
        ctx.how = how
        gate, up = halves.chunk(2, dim=-1)
        return how.value(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (halves,) = ctx.saved_tensors
        gate, up = halves.chunk(2, dim=-1)
        out = torch.empty_like(halves)
        for part, found in zip(out.chunk(2, dim=-1), ctx.how.gradients(grad, gate, up), strict=True):
            part.copy_(found)
        return out, None


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return ACTIVATIONS[name].value(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ACTIVATIONS[ctx.name].gradient(grad, x), None
