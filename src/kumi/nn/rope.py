"""Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) and their scalings for longer contexts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kumi.nn.dtypes import wide
from kumi.spec.model import Rope


def tables(rope: Rope, size: int, position_ids: Tensor, length: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """cos and signed sin (B, S, 1, R) in float32 for every position, as `rotate` wants them, of heads of which R =
    `size` dims are turned. `length` is the length of the whole document that each position (B, S) belongs to, or one
    number for all.

    They are made anew in each forward pass: no buffer that a build on the meta device or a sharding could lose.
    """
    angles = position_ids[..., None, None].float() * frequencies(rope, size, position_ids.device, length)
    cos, sin = angles.cos(), angles.sin()
    if rope.attention_factor is not None:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    if rope.query_growth:
        grown = _growth(rope, position_ids)
        cos, sin = cos * grown, sin * grown
    if rope.interleave:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _growth(rope: Rope, position_ids: Tensor) -> Tensor:
    """What queries are multiplied by besides (B, S, 1, 1): more in every further multiple of the original context."""
    assert rope.original_max_position_embeddings is not None
    contexts = (position_ids // rope.original_max_position_embeddings).float()
    return 1 + rope.query_growth * torch.log1p(contexts)[..., None, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleave: bool = False) -> Tensor:
    """`x` (B, S, heads, E) with each pair of its first R dims turned by its angle, computed in float32 or wider: dims i
    and i + R/2, or with `interleave` 2i and 2i + 1. `cos` and `sin` are those of `tables`."""
    turned: Tensor = _Rotate.apply(x, cos, sin, interleave)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    """In few passes over memory, keeping nothing of `x`: the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleave = interleave
        return _turn(x, cos, sin, interleave)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin, ctx.interleave), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    size = cos.shape[-1]
    values = x[..., :size].to(wide(x.dtype))
    out = values * cos
    pairs = (slice(0, size, 2), slice(1, size, 2)) if interleave else (slice(0, size // 2), slice(size // 2, size))
    for one, other in (pairs, pairs[::-1]):
        out[..., one].addcmul_(values[..., other], sin[..., one])
    turned = out.to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


def frequencies(rope: Rope, size: int, device: torch.device | None = None, length: int | Tensor = 0) -> Tensor:
    """Radians per position of each of the pairs (size / 2,), in float32, in documents of `length`; where that is a
    tensor (B, S) and the frequencies depend on it, (B, S, 1, size / 2)."""
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
    """Every pair is stretched by its own number; documents longer than the original context have others.

    In the order of transformers' operations, so that the tables are the same to the bit.
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
    """Wavelengths beyond the original context are stretched by `factor`, short ones kept, with a ramp between."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert original is not None
    assert low is not None
    assert high is not None
    turns = original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def _yarn(rope: Rope, head_dim: int, plain: Tensor) -> Tensor:
    """Pairs that turn more than `beta_fast` times in the original context are kept, below `beta_slow` stretched."""
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    low, high = _pair(rope, head_dim, rope.beta_fast), _pair(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    index = torch.arange(head_dim // 2, dtype=torch.float32, device=plain.device)
    stretch = ((index - low) / width).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def _pair(rope: Rope, head_dim: int, turns: float) -> float:
    """The (fractional) index of the pair that makes `turns` turns in the original context."""
    assert rope.original_max_position_embeddings is not None
    ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(rope.rope_theta))
