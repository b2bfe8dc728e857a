"""Norm, rotation, gate: values and gradients against their plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from kumi.nn import rope
from kumi.nn.linear import Linear
from kumi.nn.mlp import gated
from kumi.nn.norm import RMSNorm
from kumi.spec.model import Rope


def norm(size, dtype=torch.float64):
    layer = RMSNorm(size, 1e-5, device=None, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(size, generator=torch.Generator().manual_seed(1)))
    return layer


def random(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def test_norm_gradcheck():
    layer, x = norm(6), random(2, 3, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: torch.func.functional_call(layer, {"weight": weight}, x),
                                    (x, layer.weight))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_as_exact_as_its_dtype(dtype):
    layer, x = norm(64, torch.float32), random(4, 8, 64, dtype=dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    weight = layer.weight.detach().double().requires_grad_()
    exact = F.rms_norm(wide, (64,), weight, 1e-5)
    grad = random(4, 8, 64)
    found, expected = layer(x), exact.to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found, (x, layer.weight), grad.to(dtype))
    exacts = torch.autograd.grad(exact, (wide, weight), grad.to(dtype).double())
    torch.testing.assert_close(grads[0], exacts[0].to(dtype))
    torch.testing.assert_close(grads[1], exacts[1].float())


def test_norm_of_nearly_nothing_is_finite():
    assert norm(8)(torch.zeros(1, 8, dtype=torch.float64)).abs().max() == 0


def test_rotation_gradcheck_and_lengths():
    positions = torch.arange(5).expand(2, 5)
    cos, sin = (table.double() for table in rope.tables(Rope(100.0), 8, positions))
    x = random(2, 5, 3, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope.rotate(x, cos, sin), x)
    torch.testing.assert_close(rope.rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)


def test_rotated_products_depend_on_distance_alone():
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8) + 1

    def product(a, b):
        turned = [rope.rotate(x, *rope.tables(Rope(100.0), 8, torch.tensor([[p]]))) for x, p in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(7, 3), product(107, 103), rtol=1e-4, atol=1e-4)


def test_gate_gradcheck():
    gate, up = random(3, 5).requires_grad_(), (random(3, 5) + 1).requires_grad_()
    torch.testing.assert_close(gated(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(gated, (gate, up))


def test_linear_computes_in_the_dtype_of_its_input():
    layer = Linear(4, 3, bias=True, device=None, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    out = layer(torch.ones(2, 4, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
