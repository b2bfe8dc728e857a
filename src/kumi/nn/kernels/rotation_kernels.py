"""A Triton kernel for rotary position embeddings (Su et al., 2021, arXiv:2104.09864), and for their gradient.

Bytes moved: 4 for each number of 2 bytes, and 8 R for each token's cos and sin of the R rotated dims, which its heads
share. The plain path has float32 copies and moves 32. Under `torch.compile` the plain path is used, which the
compiler fuses with the operations around it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kumi.nn.custom_ops import define_op

# Numbers that a program has in registers: as many heads of one token as fit.
_TILE = 4096


@triton.jit
def rotate_heads(
    x,
    cos,
    sin,
    out,
    angle_rows,
    heads,
    token_stride,
    head_stride,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write to `out` (T, heads, SIZE) the heads of `x`, the first ROTATED numbers of each head rotated.

    `x`: T tokens, `token_stride` numbers apart, of heads that are `head_stride` apart.
    `cos` and signed `sin` (angle_rows, ROTATED), float32, as `kumi.nn.rope.cos_sin` returns them; `angle_rows` divides
    T: tokens of several sequences may have the same positions. Rotate backwards if INVERSE.
    A program computes HEADS heads of one token. LANES: SIZE, rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)
    turns = lanes < ROTATED
    half = ROTATED // 2
    partners = lanes ^ 1 if INTERLEAVE else tl.where(lanes < half, lanes + half, lanes - half)
    angles = (token % angle_rows) * ROTATED + lanes
    cosines, sines = tl.load(cos + angles, mask=turns, other=1.0), tl.load(sin + angles, mask=turns, other=0.0)
    if INVERSE:
        sines = -sines
    inside = (head < heads)[:, None] & (lanes < SIZE)[None, :]
    start = x + token * token_stride + head[:, None] * head_stride
    values = tl.load(start + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
    turning = inside & turns[None, :]
    others = tl.load(start + partners[None, :], mask=turning, other=0.0).to(tl.float32)
    rotated = values * cosines[None, :] + others * sines[None, :]
    targets = out + (token * heads + head[:, None]) * SIZE + lanes[None, :]
    tl.store(targets, rotated.to(out.dtype.element_ty), mask=inside)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool, inverse: bool) -> Tensor:
    rows, length, heads, size = x.shape
    if x.stride(3) != 1 or x.stride(0) != length * x.stride(1):
        x = x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    angle_rows = cos.numel() // cos.shape[-1]
    if cos.shape[:2] not in ((rows, length), (1, length)):
        raise ValueError(f"angles of shape {tuple(cos.shape)} do not fit tokens of shape {tuple(x.shape)}")
    if out.numel():
        lanes = triton.next_power_of_2(size)
        at_once = min(max(_TILE // lanes, 1), triton.next_power_of_2(heads))
        flags = {"INTERLEAVE": interleave, "INVERSE": inverse, "HEADS": at_once, "LANES": lanes}
        rotate_heads[rows * length, triton.cdiv(heads, at_once)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            out,
            angle_rows,
            heads,
            x.stride(1),
            x.stride(2),
            SIZE=size,
            ROTATED=cos.shape[-1],
            **flags,
        )
    return out


rotated = define_op(
    "rotate_heads",
    "(Tensor x, Tensor cos, Tensor sin, bool interleave, bool inverse) -> Tensor",
    _rotated,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
