"""A linear layer that casts its parameters to the dtype of its input, and can defer its weight gradient.

A pipeline schedule that splits the backward pass computes the input's gradient at once, because the previous stage
waits for it, and the weight's gradient when the rank would be idle (Qi et al., 2024, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Deferred weight gradients: each call adds to the gradient of one layer's weights.
DeferredWgrads = list[Callable[[], None]]


class PackedMatrix(Protocol):
    """A frozen matrix in a quantised format that has to be unpacked for computation."""

    shape: tuple[int, int]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b."""

    def matrix(self) -> Tensor:
        """Return W, in its original dtype."""


class Linear(nn.Module):
    """y = x W^T + b in the dtype of `x`; the parameters are cast in the forward pass.

    `adds_bias`: this layer adds the bias. Tensor parallelism unsets it and adds the bias after the sum over ranks.
    `multiply`: computes x W^T + b; can be replaced by a function that multiplies in fewer bits.
    `defers_wgrad`: allow the backward pass to defer the gradient of a trained weight.
    `deferred_wgrads`: the list of deferred gradients; None to compute them at once.
    `packed`: the matrix if it is quantised; `weight` is then removed.
    `weight_copy`: a copy of the weight in another dtype, which the layer's owner updates with the weight; None to cast
        the weight in each forward pass.
    """

    weight: nn.Parameter

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.adds_bias = bias
        self.multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.defers_wgrad = False
        self.deferred_wgrads: DeferredWgrads | None = None
        self.packed: PackedMatrix | None = None
        self.weight_copy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias.to(x.dtype) if self.bias is not None and self.adds_bias else None)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W^T + b, with `bias` in the dtype of `x`."""
        if self.packed is not None:
            return self.packed.product(x, bias)
        weight = self.weight_in(x.dtype)
        if not (self.defers_wgrad and self.weight.requires_grad and torch.is_grad_enabled()):
            return self.multiply(x, weight, bias)
        out: Tensor = _DeferrableLinear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return out

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`, differentiable."""
        if self.weight_copy is None or self.weight_copy.dtype != dtype:
            return self.weight.to(dtype)
        copy: Tensor = _WeightCopy.apply(self.weight, self.weight_copy)  # type: ignore[no-untyped-call]
        return copy

    def matrix(self) -> Tensor:
        """Return W in its stored dtype."""
        return self.weight if self.packed is None else self.packed.matrix()

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape) if self.packed is None else self.packed.shape
        return f"{shape}, bias={self.bias is not None}"


class _WeightCopy(torch.autograd.Function):
    """A weight's copy in the place of a cast: the gradient of the copy is that of the weight, in the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class HeadLinear(Linear):
    """The output projection, whose weight only the function that a call gets computes with.

    A loss multiplies chunks of tokens with the weight, and has a gradient of its own. The call around it lets hooks of
    the module act as for any layer: FSDP2 gathers the weight before.
    """

    def forward(self, outputs: Callable[[Tensor], Any]) -> Any:  # type: ignore[override]
        """Return the result of `outputs` for the weight (V, D)."""
        return outputs(self.weight)


class _DeferrableLinear(torch.autograd.Function):
    """F.linear with a backward pass that can defer the weight's gradient to `layer.deferred_wgrads`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Linear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        layer, x, grad = ctx.layer, x.flatten(0, -2), grad.flatten(0, -2)
        if layer.deferred_wgrads is not None:
            # Under FSDP2, `layer.weight` is the gathered parameter now, and the sharded one later.
            bias = layer.bias if layer.adds_bias else None
            layer.deferred_wgrads.append(partial(add_gradients, layer.weight, bias, x, grad))
            return grad_x, None, None, None
        return grad_x, grad.T @ x, grad.sum(0) if ctx.needs_input_grad[2] else None, None


@torch.no_grad()
def add_gradients(weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, grad: Tensor) -> None:
    """Add to the gradients of `weight` (O, I) and `bias` (O,).

    `x` (T, I) is the layer's input, `grad` (T, O) the gradient of its output.
    """
    if weight.grad is not None and weight.grad.dtype == x.dtype:
        weight.grad.addmm_(grad.T, x)
    else:
        _accumulate_grad(weight, grad.T @ x)
    if bias is not None:
        _accumulate_grad(bias, grad.sum(0))


def _accumulate_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = grad.to(parameter.dtype)
    else:
        parameter.grad += grad


def linears(module: nn.Module) -> list[Linear]:
    """Return the linear layers in `module`."""
    return [part for part in module.modules() if isinstance(part, Linear)]
