"""A Mamba-2 mixer (Dao and Gu, 2024, arXiv:2405.21060): projections, a causal convolution, the recurrence of
`kumi.nn.mamba_scan`, a gated norm, and an output projection.

The projections are separate matrices, so that a tensor-parallel rank can hold complete groups of heads: gate (z),
channels (x), input to the states (b), output of the states (c), step sizes (dt). The convolution is split likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.attention.attention_context import AttentionContext, document_starts
from kumi.nn.custom_ops import define_op
from kumi.nn.dtypes import wide
from kumi.nn.linear import Linear
from kumi.nn.mamba_scan import ScanInputs, scan
from kumi.nn.tp_block import UNSHARDED
from kumi.nn.traced import traced
from kumi.spec import model

# Largest number of elements of a convolution that are computed at once: (on devices other than a CPU, on a CPU).
ELEMENTS_AT_ONCE = (2**26, 2**20)


class Mamba(nn.Module):
    """A function of hidden states and `AttentionContext`. Every document starts with an empty state and convolution."""

    def __init__(
        self, hidden_size: int, spec: model.Mamba, eps: float, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec, self.projections = spec, UNSHARDED
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        shared = spec.n_groups * spec.state_size
        self.z_proj = Linear(hidden_size, spec.width, bias=spec.bias, **options)
        self.x_proj = Linear(hidden_size, spec.width, bias=spec.bias, **options)
        self.b_proj = Linear(hidden_size, shared, bias=spec.bias, **options)
        self.c_proj = Linear(hidden_size, shared, bias=spec.bias, **options)
        self.dt_proj = Linear(hidden_size, spec.num_heads, bias=spec.bias, **options)
        self.x_conv1d = Convolution(spec.width, spec, **options)
        self.b_conv1d = Convolution(shared, spec, **options)
        self.c_conv1d = Convolution(shared, spec, **options)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(spec.num_heads, **options)) for _ in range(3))
        self.norm = GatedNorm(spec.width, spec.width // spec.n_groups, eps, **options)
        self.out_proj = Linear(spec.width, hidden_size, bias=spec.bias, **options)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Return the mixer's output for hidden states `x` (B, S, D) or (B * S, D), in the same shape."""
        spec, numbers, memory = self.spec, document_numbers(context), context.recurrence
        projections = (self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj)
        z, value, b, c, dt = (part.view(*context.shape, -1) for part in self.projections.column_linear(x, projections))
        # In generation, `memory` has the state of each sequence after its earlier tokens.
        convolve, recur = (_convolve, scan) if memory is None else (memory.convolve, memory.scan)
        convolutions = (self.x_conv1d, self.b_conv1d, self.c_conv1d)
        value, b, c = convolve(convolutions, (value, b, c), numbers)
        value = value.reshape(*context.shape, -1, spec.head_dim)
        b, c = (part.reshape(*context.shape, -1, spec.state_size) for part in (b, c))
        low, high = spec.time_step_limit
        out = recur(ScanInputs(value, b, c, dt, self.dt_bias, self.A_log, self.D, numbers, spec.chunk_size, low, high))
        return self.projections.row_linear(self.norm(out.flatten(2), z), self.out_proj).view(x.shape)


def _convolve(convolutions: Sequence[nn.Module], inputs: Sequence[Tensor], numbers: Tensor | None) -> list[Tensor]:
    return [convolution(x, numbers) for convolution, x in zip(convolutions, inputs, strict=True)]


def document_numbers(context: AttentionContext) -> Tensor | None:
    """Return the number (B, S) of each token's document in its row; None if every row is one document."""
    return None if context.document_ids is None else document_starts(context.document_ids).cumsum(1)


class Convolution(nn.Module):
    """A causal depthwise convolution followed by silu.

    The result at a position depends on at most `conv_kernel` positions of its document: itself and those before it.
    """

    def __init__(self, channels: int, spec: model.Mamba, *, device: torch.device | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, spec.conv_kernel, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if spec.conv_bias else None

    def forward(self, x: Tensor, numbers: Tensor | None) -> Tensor:
        """Return the result for `x` (B, S, C), in the same shape. `numbers` (B, S) are document numbers, or None."""
        out: Tensor = _Convolution.apply(x, self.weight, self.bias, numbers)  # type: ignore[no-untyped-call]
        return out


class _Convolution(torch.autograd.Function):
    """The convolution as one autograd function, which keeps its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, numbers)
        out: Tensor = CONVOLUTION(x, weight, bias, numbers)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, numbers = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = CONVOLUTION_BACKWARD(grad, x, weight, bias, numbers)
        return grad_x, grad_weight, None if bias is None else grad_bias, None


def _earlier(x: Tensor, by: int, numbers: Tensor | None) -> Tensor:
    """Return x[:, s - by] for s = by, by + 1, ..., with 0 where that position is in another document."""
    part = x[:, : x.shape[1] - by]
    if numbers is None or not by:
        return part
    return part * (numbers[:, by:] == numbers[:, :-by])[..., None]


def _weighted_sum(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None) -> Tensor:
    """Return the convolution (B, S, C) of `x`, computed in the dtype of `x`."""
    taps = weight.to(x.dtype).squeeze(1).T
    out = x * taps[-1]
    for by in range(1, min(len(taps), x.shape[1])):
        out[:, by:].addcmul_(_earlier(x, by, numbers), taps[-1 - by])
    return out if bias is None else out.add_(bias.to(x.dtype))


def _blocks(x: Tensor) -> Iterator[slice]:
    """Return slices of the channels of `x` (B, S, C) with at most `ELEMENTS_AT_ONCE` elements: they bound the float32
    buffers."""
    rows, length, channels = x.shape
    size = max(1, ELEMENTS_AT_ONCE[x.device.type == "cpu"] // (rows * length))
    return (slice(first, first + size) for first in range(0, channels, size))


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    for part in _blocks(x):
        values = x[..., part].to(wide(x.dtype))
        convolved = _weighted_sum(values, weight[part], None if bias is None else bias[part], numbers)
        out[..., part] = F.silu(convolved, inplace=True)
    return out


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None
) -> list[Tensor]:
    """Return the gradients of input, weight and bias; the last is a tensor even if there is no bias."""
    grads = [torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight[:, 0, 0])]
    for part in _blocks(x):
        bias_part = None if bias is None else bias[part]
        grad_x, grad_weight, grad_bias = _block_backward(
            grad[..., part], x[..., part], weight[part], bias_part, numbers
        )
        grads[0][..., part], grads[1][part], grads[2][part] = grad_x, grad_weight, grad_bias
    return grads


def _block_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    values = x.to(wide(x.dtype))
    grad = torch.ops.aten.silu_backward(grad.to(values.dtype), _weighted_sum(values, weight, bias, numbers))
    taps = weight.to(values.dtype).squeeze(1).T
    grad_x, grad_taps = grad * taps[-1], torch.zeros_like(taps)
    for by in range(min(len(taps), x.shape[1])):
        later, earlier = grad[:, by:], values[:, : x.shape[1] - by]
        if by and numbers is not None:
            later = later * (numbers[:, by:] == numbers[:, :-by])[..., None]
        grad_taps[-1 - by] = (later * earlier).sum((0, 1))
        if by:
            grad_x[:, : x.shape[1] - by].addcmul_(later, taps[-1 - by])
    return grad_x, grad_taps.T.unsqueeze(1), grad.sum((0, 1))


CONVOLUTION = define_op(
    "mamba_convolution",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? numbers) -> Tensor",
    _convolution,
    lambda x, *_: torch.empty_like(x),
)
CONVOLUTION_BACKWARD = define_op(
    "mamba_convolution_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor? numbers) -> Tensor[]",
    _convolution_backward,
    lambda grad, x, weight, *_: [torch.empty_like(x), torch.empty_like(weight), weight.new_empty(len(weight))],
)


@register_flop_formula(torch.ops.kumi.mamba_convolution)
def _flops(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Return the FLOPs of the forward pass, as `kumi.spec.op.Op.forward_flops` counts them."""
    rows, length, channels = x
    return 2 * rows * length * channels * weight[2]


@register_flop_formula(torch.ops.kumi.mamba_convolution_backward)
def _backward_flops(_: Any, x: tuple[int, ...], weight: tuple[int, ...], *__: Any, **___: Any) -> int:
    """Return the FLOPs of the backward pass: the gradients of input and weight, and the recomputed convolution."""
    return 3 * _flops(x, weight)


class GatedNorm(nn.Module):
    """y / rms(y) * weight with y = x * silu(gate). Each rms is that of `size` consecutive channels.

    Statistics are in float32 or wider, the result is in the dtype of `x`.
    """

    def __init__(
        self, channels: int, size: int, eps: float, *, device: torch.device | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the normalised result for `x` and `gate` (..., C), in the same shape."""
        out: Tensor = _GatedNorm.apply(x, gate, self.weight, self.size, self.eps)  # type: ignore[no-untyped-call]
        return out


class _GatedNorm(torch.autograd.Function):
    """The gated norm as one autograd function, which keeps its two inputs and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, size: int, eps: float) -> Tensor:
        gated = _gated(x, gate)
        gated = gated.view(*gated.shape[:-1], -1, size)
        scale = torch.linalg.vector_norm(gated, dim=-1, keepdim=True).square_().mul_(1 / size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gate, weight, scale)
        out: Tensor = gated.mul_(scale).flatten(-2).mul_(weight).to(x.dtype)
        return traced(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients.

        With u = y * scale and v = grad * weight, the gradient of y is scale * (v - u * mean(v * u)).
        """
        x, gate, weight, scale = ctx.saved_tensors
        normed = _gated(x, gate).view(*scale.shape[:-1], -1).mul_(scale)
        grad = grad.to(normed.dtype).view_as(normed)
        grad_weight = (grad * normed).flatten(0, -3).sum(0).flatten().to(weight.dtype)
        grad_normed = grad * weight.to(grad.dtype).view(normed.shape[-2:])
        del grad  # this wider copy is as large as all tensors that the forward saved
        mean = (grad_normed * normed).mean(-1, keepdim=True)
        grad_gated = grad_normed.sub_(normed.mul_(mean)).mul_(scale).view_as(x)
        del normed
        wide_gate = gate.to(grad_gated.dtype)
        grad_gate = torch.ops.aten.silu_backward(grad_gated * x, wide_gate).to(gate.dtype)
        return grad_gated.mul_(F.silu(wide_gate)).to(x.dtype), grad_gate, grad_weight, None, None


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    dtype = wide(x.dtype)
    return F.silu(gate.to(dtype)).mul_(x)
