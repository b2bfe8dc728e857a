"""Normalisation over the last dim: RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467) and LayerNorm (Ba et al., 2016,
arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.compat import fused_rms_norm, fused_rms_norm_backward
from kumi.nn.dtypes import wide
from kumi.nn.traced import traced
from kumi.spec.model import ModelSpec

# (x, weight, eps, zero_centered) -> the normalised x.
NormFunction = Callable[[Tensor, Tensor, float, bool], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, with statistics in float32 or wider and the result in the dtype of `x`.

    `zero_centered`: the factor is 1 + weight, computed in float32 or wider.
    `function` is `rms_norm`; tensor parallelism replaces it where ranks hold parts of a vector.
    """

    def __init__(
        self, size: int, eps: float, *, device: torch.device | None, dtype: torch.dtype, zero_centered: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.function: NormFunction = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.eps, self.zero_centered)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Return x / rms(x) * weight over the last dim of `x`; the factor is 1 + weight if `zero_centered`."""
    if x.device.type == "cpu":
        if not torch.is_grad_enabled():
            return _normalized(x, weight, eps, zero_centered)[0]
        normed: Tensor = _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
        return normed
    if zero_centered:
        zero_centered_normed: Tensor = _ZeroCenteredRMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return zero_centered_normed
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) * weight + bias over the last dim, with the result in the dtype of `x`.

    `bias`: add a trained bias.
    `zero_centered`: the factor is 1 + weight.
    `x` and the mean and 1 / std of each vector are kept for the backward pass.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        bias: bool,
        device: torch.device | None,
        dtype: torch.dtype,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight if self.zero_centered else self.weight
        # GPU kernels compute statistics in float32 for every dtype of `x`, CPU kernels only if the parameters are
        # wider.
        dtype = x.dtype if x.device.type != "cpu" else wide(x.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.layer_norm(x, self.weight.shape, weight.to(dtype), bias, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, bias={self.bias is not None}"


def build_norm(spec: ModelSpec, *, device: torch.device | None, dtype: torch.dtype) -> RMSNorm | LayerNorm:
    """Return a norm of hidden states, of the model's kind."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "zero_centered": spec.zero_centered_norm}
    if spec.norm == "layernorm":
        return LayerNorm(spec.hidden_size, spec.norm_eps, bias=spec.norm_bias, **options)
    return RMSNorm(spec.hidden_size, spec.norm_eps, **options)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm on the CPU, which has no fused kernel: few passes over memory, keeping only `x` and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        normed, scale = _normalized(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, scale)
        ctx.zero_centered = zero_centered
        return traced(normed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients, computed by LayerNorm's fused kernel with mean 0.

        That kernel computes scale * (g - mean(g) - y * mean(g * y)) with g = grad * weight and y = x * scale. RMSNorm
        has no centring and therefore no mean(g), which is added back.
        """
        x, weight, scale = ctx.saved_tensors
        size, dtype = x.shape[-1], wide(x.dtype)
        grad, mean, gain = grad.to(dtype), torch.zeros_like(scale), _factor(weight, dtype, ctx.zero_centered)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x.to(dtype), [size], mean, scale, gain, None, [True, True, False]
        )
        mean_term = torch.mv(grad.reshape(-1, size), gain).view_as(scale).mul_(scale).mul_(1 / size)
        return grad_x.add_(mean_term).to(x.dtype), grad_weight.to(weight.dtype), None, None


class _ZeroCenteredRMSNorm(torch.autograd.Function):
    """RMSNorm with the factor 1 + weight on a GPU.

    The fused kernel needs the factor in the dtype of `x`, and 16 bits are too coarse for 1 + weight: `x` is cast to
    float32 or wider for the kernel, and kept as it is for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = wide(x.dtype)
        normed, scale = fused_rms_norm(x.to(dtype), _factor(weight, dtype, zero_centered=True), eps)
        ctx.save_for_backward(x, weight, scale)
        return normed.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        dtype = wide(x.dtype)
        factor = _factor(weight, dtype, zero_centered=True)
        grad_x, grad_weight = fused_rms_norm_backward(grad.to(dtype), x.to(dtype), scale, factor)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _normalized(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) * weight, and 1 / rms(x)."""
    values = x.to(wide(x.dtype))
    square = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_()
    scale = square.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (values * scale).mul_(_factor(weight, values.dtype, zero_centered)).to(x.dtype), scale


def _factor(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    weight = weight.to(dtype)
    return 1 + weight if zero_centered else weight
