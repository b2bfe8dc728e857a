"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kumi.nn.dtypes import wide


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, statistics in float32 or wider, result in the dtype of `x`."""

    def __init__(self, size: int, eps: float, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return normed
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    """The CPU has no fused kernel for this norm: few passes over memory, and nothing kept but `x` and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = x.to(wide(x.dtype))
        square = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_()
        scale = square.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = (values * scale).mul_(weight).to(x.dtype)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """By layer normalisation's fused kernel with mean 0.

        Its gradient is scale * (g - mean(g) - y * mean(g * y)) with g = grad * weight and y = x * scale; only the term
        mean(g), which comes from centring, is not in this norm's, and is added back.
        """
        x, weight, scale = ctx.saved_tensors
        size, dtype = x.shape[-1], wide(x.dtype)
        grad, mean, gain = grad.to(dtype), torch.zeros_like(scale), weight.to(dtype)
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x.to(dtype), [size], mean, scale, gain, None, [True, True, False]
        )
        centred = torch.mv(grad.reshape(-1, size), gain).view_as(scale).mul_(scale).mul_(1 / size)
        return grad_x.add_(centred).to(x.dtype), grad_weight.to(weight.dtype), None
