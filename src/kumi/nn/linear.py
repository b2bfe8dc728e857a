"""A linear layer whose weights may be kept in another dtype than it computes in, and whose weight gradient may wait.

A pipeline that splits the backward pass wants the gradient of the input at once, for the stage before waits for it, and
that of the weight when there is nothing else to do (Qi et al., 2024, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What is left to do of a backward pass: each call adds to the gradient of one layer's weights.
Later = list[Callable[[], None]]


class Packed(Protocol):
    """A frozen matrix in fewer bits than can be computed with."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b."""

    def matrix(self) -> Tensor:
        """W, in the dtype it had."""


class Linear(nn.Module):
    """y = x W^T + b in the dtype of `x`; the parameters are cast where they are used.

    Where `splits` is set, the backward pass leaves gradients of a trained weight to `later`, unless that is None.
    `multiply` may be a product in fewer bits. Where the matrix is `packed`, it is no parameter.
    """

    weight: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.adds_bias = bias  # tensor parallelism adds it once, after the sum over ranks
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.splits = False
        self.later: Later | None = None
        self.packed: Packed | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias.to(x.dtype) if self.bias is not None and self.adds_bias else None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, given `bias` in the dtype of `x`."""
        if self.packed is not None:
            return self.packed.product(x, bias)
        weight = self.weight.to(x.dtype)
        if not (self.splits and self.weight.requires_grad and torch.is_grad_enabled()):
            return self.multiply(x, weight, bias)
        out: Tensor = _Split.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return out

    def matrix(self) -> Tensor:
        """W as it is kept."""
        return self.weight if self.packed is None else self.packed.matrix()

    def extra_repr(self) -> str:
        return f"{tuple(self.matrix().shape)}, bias={self.bias is not None}"


class _Split(torch.autograd.Function):
    """F.linear, whose backward pass leaves the weight's gradient for later where its layer says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        layer, x, grad = ctx.layer, x.flatten(0, -2), grad.flatten(0, -2)
        if layer.later is not None:
            # The parameters as they are now: those that FSDP2 has gathered, where it divides them.
            bias = layer.bias if layer.adds_bias else None
            layer.later.append(partial(add_gradients, layer.weight, bias, x, grad))
            return of_x, None, None, None
        return of_x, grad.T @ x, grad.sum(0) if ctx.needs_input_grad[2] else None, None


@torch.no_grad()
def add_gradients(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, grad: Tensor) -> None:
    """Adds the gradients of `weight` (O, I) and `bias` (O,), given the layer's input (T, I) and its output's gradient
    (T, O)."""
    if weight.grad is not None and weight.grad.dtype == x.dtype:
        weight.grad.addmm_(grad.T, x)
    else:
        _add(weight, grad.T @ x)
    if bias is not None:
        _add(bias, grad.sum(0))


def _add(parameter: nn.Parameter, found: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = found.to(parameter.dtype)
    else:
        parameter.grad += found


def linears(module: nn.Module) -> list[Linear]:
    """The linear layers in `module`."""
    return [part for part in module.modules() if isinstance(part, Linear)]
