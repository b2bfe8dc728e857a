"""Grouped GEMMs of experts on the GPU, where one kernel computes groups of any size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kumi.nn.grouped_gemm import grouped_linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[37, 0, 128, 1, 90], [0, 256, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("sizes", [(64, 96), (60, 90)], ids=str)
def test_grouped_products(dtype, counts, sizes, device):
    generator = torch.Generator().manual_seed(0)
    into, out = sizes
    values = [torch.randn(shape, generator=generator) for shape in ((256, into), (5, out, into), (256, out))]
    rows, weight, grad = (value.to(device, dtype) for value in values)
    rows.requires_grad_(), weight.requires_grad_()
    expected = torch.cat([F.linear(part, matrix) for part, matrix in zip(rows.split(counts), weight)])
    product = grouped_linear(rows, weight, torch.tensor(counts, device=device))
    references = [expected, *torch.autograd.grad(expected, (rows, weight), grad)]
    for actual, other in zip([product, *torch.autograd.grad(product, (rows, weight), grad)], references, strict=True):
        assert (actual - other).norm() <= 1e-2 * other.norm()
