"""The decoder on the GPU against itself on the CPU: logits and gradients of every family."""

from __future__ import annotations

import pytest
import torch

from kumi.nn import Decoder

pytest.importorskip("transformers")  # the tiny models are written as its configs
from tiny_models import CASES, build_pair


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference, relative to the expected tensor."""
    expected = expected.double().cpu()
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


def tokens(decoder: Decoder) -> torch.Tensor:
    return torch.randint(0, decoder.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))


def gradients(decoder: Decoder, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = torch.full(ids.shape, -1 / ids.numel(), device=ids.device)
    total, _ = decoder(ids, labels=ids.roll(-1, dims=1), token_weights=weights)
    total.backward()
    grads = {name: parameter.grad.cpu() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("name", CASES)
def test_float32(name, device):
    _, decoder = build_pair(name)
    ids = tokens(decoder)
    with torch.no_grad():
        expected = decoder(ids)
    expected_gradients = gradients(decoder, ids)
    decoder.to(device)
    with torch.no_grad():
        assert (decoder(ids.to(device)).cpu() - expected).abs().max() <= 1e-4
    for key, gradient in gradients(decoder, ids.to(device)).items():
        assert relative(gradient, expected_gradients[key]) <= 1e-4, key


# Rounding decides which experts a token goes to where two are as good.
WITHOUT_CHOICE = [
    name
    for name, (_, changes) in CASES.items()
    if "num_experts_per_tok" not in changes and "num_local_experts" not in changes
]


@pytest.mark.parametrize("name", WITHOUT_CHOICE)
def test_bfloat16_is_as_near_to_float32_as_on_the_cpu(name, device):
    _, decoder = build_pair(name)
    ids = tokens(decoder)
    with torch.no_grad():
        exact = decoder(ids)
    exact_gradients = gradients(decoder, ids)
    decoder.compute_dtype = torch.bfloat16
    with torch.no_grad():
        on_cpu = relative(decoder(ids), exact)
    cpu_gradients = {key: relative(found, exact_gradients[key]) for key, found in gradients(decoder, ids).items()}
    decoder.to(device)
    with torch.no_grad():
        assert relative(decoder(ids.to(device)), exact) <= 2 * on_cpu + 1e-3
    for key, gradient in gradients(decoder, ids.to(device)).items():
        assert relative(gradient, exact_gradients[key]) <= 2 * cpu_gradients[key] + 1e-2, key
