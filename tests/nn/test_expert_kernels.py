"""The kernels that copy tokens to experts and back: interpreted, against the plain path, and compiled for GPUs."""

from __future__ import annotations

import torch

from kumi.nn.moe import gather_weighted, sorted_places, spread
from kumi.nn.numerics import use_kernels
from triton_process import check_compiled, compiled_launches, compiling, interpreted

KERNEL = (("experts", "triton"),)
# Largest difference from the plain path, of the largest value. Sums are in another order; and where a GPU rounds to
# bfloat16 to nearest, the interpreter cuts off, up to 2^-7 twice in a round trip.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
# (tokens, hidden size, experts, choices): one token, one choice, odd numbers, several blocks of columns, no token.
SHAPES = [(1, 8, 4, 2), (1, 1, 1, 1), (7, 24, 5, 3), (13, 700, 16, 8), (3, 2100, 4, 4), (0, 8, 4, 2)]


def both(shape, dtype, used):
    """Return rows and tokens of a round trip through expert-dependent factors, and all gradients.

    Of all experts, only the first `used` are chosen; the others get no rows.
    """
    tokens, size, _, choices = shape
    random = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(tokens, size, generator=random).to(dtype).requires_grad_()
    weights = torch.rand(tokens, choices, generator=random).requires_grad_()
    ids = torch.rand(tokens, max(used, choices), generator=random).argsort(dim=1)[:, :choices]
    places = sorted_places(ids)
    rows = spread(x, places)
    factors = torch.randn(rows.shape, generator=random).to(dtype)
    out = gather_weighted(rows * factors, weights, places)
    towards = torch.randn(out.shape, generator=random).to(dtype)
    return [rows, out, *torch.autograd.grad((out * towards).sum(), (x, weights))]


@interpreted
def test_equal_to_the_plain_path():
    for dtype, tolerance in TOLERANCE.items():
        for shape in SHAPES:
            for used in (shape[2], 1):
                use_kernels(())
                expected = both(shape, dtype, used)
                use_kernels(KERNEL)
                results = both(shape, dtype, used)
                assert torch.equal(results[0], expected[0])  # copies
                for value, reference in zip(results, expected, strict=True):
                    assert value.dtype == reference.dtype
                    assert value.shape == reference.shape
                    if value.numel():
                        limit = tolerance * max(1.0, reference.abs().max().item())
                        assert (value.float() - reference.float()).abs().max().item() <= limit


@interpreted
def test_views_that_are_not_contiguous():
    """Transposed tokens, and the expanded gradient of a sum."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(24, 7, generator=random).T.requires_grad_()
    places = sorted_places(torch.randint(0, 4, (7, 2), generator=random))
    weights = torch.rand(2, 7, generator=random).T.requires_grad_()

    def results():
        out = gather_weighted(spread(x, places), weights, places)
        return out, *torch.autograd.grad(out.sum(), (x, weights))

    use_kernels(())
    expected = results()
    use_kernels(KERNEL)
    torch.testing.assert_close(results(), expected)


@compiling
def test_compiled_for_gpus():
    use_kernels(KERNEL)
    with compiled_launches() as launches:
        both((5, 700, 8, 6), torch.bfloat16, 8)
    check_compiled(launches, {"spread_tokens", "sum_rows", "sum_rows_backward"})
