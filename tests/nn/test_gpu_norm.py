"""Gemma's norm by the fused kernel of GPUs, on CPU tensors: only the kernel's backward is stood in for."""

from __future__ import annotations

import pytest
import torch

from kumi.nn import norm
from kumi.nn.norm import _ZeroCenteredRMSNorm, rms_norm

EPS = 1e-5


def _backward(grad, x, scale, weight):
    """The kernel's gradients, whose tensors have one dtype."""
    assert {grad.dtype, x.dtype, weight.dtype} == {scale.dtype}
    inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    with torch.enable_grad():
        out = torch.nn.functional.rms_norm(inputs[0], weight.shape, inputs[1], EPS)
    return torch.autograd.grad(out, inputs, grad)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2**-7)])
def test_it_is_the_norm_of_the_cpu(monkeypatch, dtype, tolerance):
    monkeypatch.setattr(norm, "fused_rms_norm_backward", _backward)
    random = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(3, 5, 16, generator=random, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(16, generator=random, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    expected, result = rms_norm(x, weight, EPS, True), _ZeroCenteredRMSNorm.apply(x, weight, EPS)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    grads = [torch.autograd.grad(out, inputs, grad) for out in (result, expected)]
    assert [each.dtype for each in grads[0]] == [dtype, weight.dtype]
    torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)


def test_it_keeps_its_input_and_one_number_a_vector():
    x, weight = torch.randn(3, 16, dtype=torch.bfloat16, requires_grad=True), torch.randn(16, requires_grad=True)
    out = _ZeroCenteredRMSNorm.apply(x, weight, EPS)  # PyTorch 2.11 frees the saved tensors with it
    assert [(each.shape, each.dtype) for each in out.grad_fn.saved_tensors] == [
        ((3, 16), torch.bfloat16),
        ((16,), torch.float32),
        ((3, 1), torch.float32),
    ]
