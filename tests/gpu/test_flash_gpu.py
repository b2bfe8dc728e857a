"""The rounds of ring attention, on one GPU: partial results of fused kernels add up to attention over full rows."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kumi.nn.attention import flash_partial
from kumi.nn.attention.attention_context import Segments
from kumi.nn.attention.grouped_query import attend
from kumi.parallel.ring_attention import positions_of_rank
from nn.test_flash_parts import LENGTHS, ON_CPU, ROWS, documents_of

# Relative to the norm, of bf16's 2^-8 a rounding and a few of them.
TOLERANCE = 2e-2


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("heads", "sizes"), [((8, 2), (64, 64)), ((4, 4), (192, 128))], ids=str)
def test_parts_add_up(name, heads, sizes, device):
    if device.type != "cuda" and sizes[0] != sizes[1]:
        pytest.skip("the CPU's kernel takes heads of one size")
    cp, length = 2, 256
    random = torch.Generator().manual_seed(0)
    shapes = [(heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1]), (heads[0], sizes[1])]
    exact = [torch.randn(ROWS, length, *shape, generator=random).bfloat16() for shape in shapes]
    *qkv, grad = (x.double() for x in exact)
    ids, bounds = documents_of(length, LENGTHS[name])
    whole = attend(Segments(ids, None), *(x.requires_grad_() for x in qkv), None)
    expected = torch.autograd.grad(whole, qkv, grad)
    q, k, v, grad = (x.to(device) for x in exact)
    total, grads = torch.zeros_like(grad), [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    with nullcontext() if device.type == "cuda" else ON_CPU:
        assert flash_partial.supports_flash(q, v)
        for index in range(cp):
            own = positions_of_rank(length, cp, index)
            out = torch.zeros_like(grad[:, own], dtype=torch.float32)
            lse = torch.full_like(out[..., 0], -torch.inf)
            seen = [
                (other, flash_partial.attention_tiles(bounds, ROWS, own, other, device))
                for other in (positions_of_rank(length, cp, (index - turn) % cp) for turn in range(cp))
            ]
            for other, tiles in seen:
                flash_partial.attend_tiles(q[:, own], k[:, other], v[:, other], tiles, out, lse)
            total[:, own] = out.to(total.dtype)
            for other, tiles in seen:
                parts = [torch.zeros_like(x[:, at]) for x, at in zip(grads, (own, other, other))]
                ends = grad[:, own], q[:, own], k[:, other], v[:, other]
                flash_partial.attend_tiles_backward(*ends, tiles, total[:, own], lse, *parts)
                for whole_grad, at, part in zip(grads, (own, other, other), parts):
                    whole_grad[:, at] += part
    assert relative(total, whole.detach()) <= TOLERANCE
    for actual, whole_grad in zip(grads, expected, strict=True):
        assert relative(actual, whole_grad) <= TOLERANCE
