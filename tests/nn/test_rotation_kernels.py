"""The kernel of rotations: interpreted, against the plain path, and compiled for GPUs."""

from __future__ import annotations

import torch

from kumi.nn.numerics import use_kernels
from kumi.nn.rope import cos_sin, rotate
from kumi.spec.model import Rope
from triton_process import check_compiled, compiled_launches, compiling, interpreted

KERNEL = (("rotation", "triton"),)
# Largest difference from the plain path, of the largest value: one fused multiply-add, or for bfloat16 one rounding,
# in which the interpreter cuts off up to 2^-7.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# (sequences, tokens, heads, head size, rotated size): one token, odd numbers of heads, partial rotations, sizes that
# are no powers of two, several blocks of heads.
SHAPES = [(1, 1, 1, 2, 2), (2, 3, 5, 16, 16), (1, 7, 3, 12, 6), (2, 2, 1, 80, 20), (1, 2, 33, 192, 64)]


def both(shape, dtype, interleave, *, views=False):
    """Return the rotated heads and the gradient. With `views`, heads are a part of a wider tensor."""
    rows, length, heads, size, rotated = shape
    random = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(rows, length, heads, size + 8 * views, generator=random).to(dtype).requires_grad_()
    positions = torch.randint(0, 1000, (rows, length), generator=random)
    tables = cos_sin(Rope(1000.0, interleave=interleave, attention_factor=1.3), rotated, positions)
    out = rotate(x[..., 8 * views :], *tables, interleave=interleave)
    towards = torch.randn(out.shape, generator=random).to(dtype)
    return out, *torch.autograd.grad(out, x, towards)


@interpreted
def test_equal_to_the_plain_path():
    cases = [(shape, interleave) for shape in SHAPES for interleave in (False, True)]
    for dtype, tolerance in TOLERANCE.items():
        for number, (shape, interleave) in enumerate(cases):
            use_kernels(())
            expected = both(shape, dtype, interleave, views=bool(number % 2))
            use_kernels(KERNEL)
            results = both(shape, dtype, interleave, views=bool(number % 2))
            for value, reference in zip(results, expected, strict=True):
                assert value.dtype == reference.dtype
                limit = tolerance * reference.abs().max().item()
                assert (value.float() - reference.float()).abs().max().item() <= limit


@interpreted
def test_sequences_that_share_positions():
    x = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))
    tables = cos_sin(Rope(1000.0), 8, torch.arange(5)[None])
    use_kernels(())
    expected = rotate(x, *tables)
    use_kernels(KERNEL)
    torch.testing.assert_close(rotate(x, *tables), expected)


@compiling
def test_compiled_for_gpus():
    use_kernels(KERNEL)
    with compiled_launches() as launches:
        for interleave in (False, True):
            both((2, 3, 32, 128, 128), torch.bfloat16, interleave)
    check_compiled(launches, {"rotate_heads"})
