"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) and their scalings for longer contexts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kumi.nn.dtypes import wide
from kumi.nn.numerics import kernel
from kumi.nn.traced import traced
from kumi.spec.model import Rope


def cos_sin(rope: Rope, size: int, position_ids: Tensor, length: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin (B, S, 1, R) in float32 for `rotate`, for heads with R = `size` rotated dims.

    `position_ids`: (B, S).
    `length`: length of the complete document of each position (B, S), or one number for all.

    The tables are computed in each forward pass, so there is no buffer that a build on the meta device or FSDP could
    lose.
    """
    angles = position_ids[..., None, None].float() * frequencies(rope, size, position_ids.device, length)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor is not None:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    if rope.query_growth:
        scaling = _llama4_scaling(rope, position_ids)
        cos, sin = cos * scaling, sin * scaling
    if rope.interleave:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _llama4_scaling(rope: Rope, position_ids: Tensor) -> Tensor:
    """Return Llama 4's factor of the queries, (B, S, 1, 1).

    It is 1 + query_growth * ln(1 + floor(position / original context)).
    """
    assert rope.original_max_position_embeddings is not None
    contexts = (position_ids // rope.original_max_position_embeddings).float()
    return 1 + rope.query_growth * torch.log1p(contexts)[..., None, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleave: bool = False) -> Tensor:
    """Return `x` (B, S, heads, E) with each pair of its first R dims rotated, computed in float32 or wider.

    The pairs are dims i and i + R/2, or 2i and 2i + 1 with `interleave`. `cos` and `sin` come from `cos_sin`.
    """
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin, interleave)
    rotated: Tensor = _Rotate.apply(x, cos, sin, interleave)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """The rotation in few passes over memory. It does not save `x`; the backward pass rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleave = interleave
        return traced(_rotated(x, cos, sin, interleave))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, ctx.interleave, inverse=True), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool, inverse: bool = False) -> Tensor:
    # torch.compile fuses the plain operations with those before and after them.
    kernels = None if x.dtype == torch.float64 or torch.compiler.is_compiling() else kernel("rotation")
    if kernels is not None:
        result: Tensor = kernels.rotated(x, cos, sin, interleave, inverse)
        return result
    sin = -sin if inverse else sin
    size = cos.shape[-1]
    values = x[..., :size].to(wide(x.dtype))
    out = values * cos
    pairs = (slice(0, size, 2), slice(1, size, 2)) if interleave else (slice(0, size // 2), slice(size // 2, size))
    for half, other_half in (pairs, pairs[::-1]):
        out[..., half].addcmul_(values[..., other_half], sin[..., half])
    rotated = out.to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)


def frequencies(rope: Rope, size: int, device: torch.device | None = None, length: int | Tensor = 0) -> Tensor:
    """Return the radians per position of each pair (size / 2,), in float32, in documents of `length`.

    If `length` is a tensor (B, S) and the frequencies depend on it, the result is (B, S, 1, size / 2).
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    powers = rope.rope_theta**exponents
    plain = 1.0 / powers
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        return _yarn(rope, size, plain)
    if rope.scaling == "longrope":
        return _longrope(rope, powers, length)
    return plain


def _longrope(rope: Rope, powers: Tensor, length: int | Tensor) -> Tensor:
    """Scale each pair by its own factor of `long_factor` in documents longer than the original context, else of
    `short_factor`.

    The operations are in the order of transformers', so that the results are identical bit for bit.
    """
    assert rope.original_max_position_embeddings is not None
    assert rope.short_factor is not None
    assert rope.long_factor is not None
    factors = (rope.short_factor, rope.long_factor)
    short, long = (1.0 / (powers.new_tensor(each) * powers) for each in factors)
    beyond = length > rope.original_max_position_embeddings
    if isinstance(beyond, Tensor):
        return torch.where(beyond[..., None, None], long, short)
    return long if beyond else short


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Divide the frequencies of long wavelengths by `factor`, keep those of short ones, and interpolate between."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert original is not None
    assert low is not None
    assert high is not None
    turns = original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def _yarn(rope: Rope, head_dim: int, plain: Tensor) -> Tensor:
    """Scale the pairs by how often they rotate in the original context.

    Pairs that rotate more than `beta_fast` times are kept, those below `beta_slow` are divided by `factor`, and those
    in between are interpolated.
    """
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    low, high = _pair_index(rope, head_dim, rope.beta_fast), _pair_index(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32, device=plain.device)
    stretch = ((index - low) / width).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def _pair_index(rope: Rope, head_dim: int, turns: float) -> float:
    """Return the (fractional) index of the pair that rotates `turns` times in the original context."""
    assert rope.original_max_position_embeddings is not None
    ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(rope.rope_theta))
