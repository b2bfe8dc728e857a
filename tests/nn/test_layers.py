"""Norm, rotation, gate: values and gradients against their plain formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from kumi.nn import activation_functions, rope
from kumi.nn.linear import Linear
from kumi.nn.mlp import swiglu
from kumi.nn.norm import LayerNorm, RMSNorm
from kumi.spec.families._shared.config_keys import ACTIVATIONS
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
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(layer, {"weight": weight}, x), (x, layer.weight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_as_exact_as_its_dtype(dtype):
    layer, x = norm(64, torch.float32), random(4, 8, 64, dtype=dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    weight = layer.weight.detach().double().requires_grad_()
    exact = F.rms_norm(wide, (64,), weight, 1e-5)
    grad = random(4, 8, 64)
    result, expected = layer(x), exact.to(dtype)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected)
    grads = torch.autograd.grad(result, (x, layer.weight), grad.to(dtype))
    exacts = torch.autograd.grad(exact, (wide, weight), grad.to(dtype).double())
    torch.testing.assert_close(grads[0], exacts[0].to(dtype))
    torch.testing.assert_close(grads[1], exacts[1].float())


def affine(size, dtype=torch.float64, **options):
    layer = LayerNorm(size, 1e-5, device=None, dtype=dtype, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)))
    return layer


def test_a_zero_centred_norm_multiplies_by_one_more():
    plain, centred, x = norm(6), RMSNorm(6, 1e-5, device=None, dtype=torch.float64, zero_centered=True), random(2, 3, 6)
    with torch.no_grad():
        centred.weight.copy_(plain.weight - 1)
    torch.testing.assert_close(centred(x), plain(x))
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(centred, {"weight": weight}, x),
        (x.requires_grad_(), centred.weight),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm(bias, zero_centered):
    layer, x = affine(6, bias=bias, zero_centered=zero_centered), random(2, 3, 6)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (layer.weight + zero_centered)
    torch.testing.assert_close(layer(x), expected + (layer.bias if bias else 0.0))
    assert [name for name, _ in layer.named_parameters()] == (["weight", "bias"] if bias else ["weight"])


def test_layer_norm_of_half_precision_has_wide_statistics():
    layer, x = affine(64, torch.float32, bias=True), (random(4, 8, 64) + 30).to(torch.bfloat16).requires_grad_()
    out, saved = None, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = layer(x)
    exact = F.layer_norm(x.double(), (64,), layer.weight.double(), layer.bias.double(), 1e-5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.to(torch.bfloat16))
    assert sorted((one.nbytes, one.numel()) for one in saved if one.numel() != 64) == [(128, 32)] * 2 + [(4096, 2048)]


def test_norm_of_nearly_nothing_is_finite():
    assert norm(8)(torch.zeros(1, 8, dtype=torch.float64)).abs().max() == 0


def test_rotation_gradcheck_and_lengths():
    positions = torch.arange(5).expand(2, 5)
    cos, sin = (table.double() for table in rope.cos_sin(Rope(100.0), 8, positions))
    x = random(2, 5, 3, 8).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope.rotate(x, cos, sin), x)
    torch.testing.assert_close(rope.rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=1e-6)


def test_rotated_products_depend_on_distance_alone():
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8) + 1

    def product(a, b):
        turned = [rope.rotate(x, *rope.cos_sin(Rope(100.0), 8, torch.tensor([[p]]))) for x, p in ((q, a), (k, b))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(7, 3), product(107, 103), rtol=1e-4, atol=1e-4)


def test_gate_gradcheck():
    gate, up = random(3, 5).requires_grad_(), (random(3, 5) + 1).requires_grad_()
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (gate, up))


TANH = 2 / math.pi
FORMULAS = {
    "silu": lambda x: x * x.sigmoid(),
    "swish": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        lambda x: 0.5 * x * (1 + torch.tanh(TANH**0.5 * (x + 0.044715 * x**3))),
    ),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0).square(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    x, gate, up = random(4, 5).requires_grad_(), random(3, 8).requires_grad_(), (random(3, 8) + 1).requires_grad_()
    torch.testing.assert_close(activation_functions.activate(x, name), FORMULAS[name](x))
    assert torch.autograd.gradcheck(lambda x: activation_functions.activate(x, name), x)
    how = activation_functions.gate_by(name)
    torch.testing.assert_close(activation_functions.apply_gate(gate, up, how), FORMULAS[name](gate) * up)
    assert torch.autograd.gradcheck(lambda gate, up: activation_functions.apply_gate(gate, up, how), (gate, up))
    assert torch.autograd.gradcheck(lambda both: activation_functions.apply_gate_to_halves(both, how), up)


def test_every_activation_of_a_config_is_computed():
    assert set(activation_functions.ACTIVATIONS) == set(ACTIVATIONS) == set(FORMULAS)


def test_clamped_gates():
    gate, up = (random(6, 4) * 2).requires_grad_(), (random(6, 4).flip(0) * 2).requires_grad_()
    how, low, inside = activation_functions.clamped_swiglu(0.7, 1.3), gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
    assert (gate > 0.7).any()
    assert (up.abs() > 0.7).any()
    expected = low * (1.3 * low).sigmoid() * (inside + 1)
    result = activation_functions.apply_gate(gate, up, how)
    torch.testing.assert_close(result, expected)
    grad = random(6, 4) + 0.3
    torch.testing.assert_close(
        torch.autograd.grad(result, (gate, up), grad), torch.autograd.grad(expected, (gate, up), grad)
    )


def test_linear_computes_in_the_dtype_of_its_input():
    layer = Linear(4, 3, bias=True, device=None, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    out = layer(torch.ones(2, 4, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
