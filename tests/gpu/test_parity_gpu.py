"""The decoder on the GPU against itself on the CPU: logits and gradients of every family."""

from __future__ import annotations

import pytest
import torch

from kumi.nn import Decoder
from kumi.nn.router import routers

pytest.importorskip("transformers")  # the tiny models are written as its configs
import transformers

from tiny_models import CASES, build_pair

# Gradients far smaller than this share of the model's largest have rounding errors as large as themselves. Without RoPE
# that of a bias of keys is 0 but for rounding, because the bias adds the same to all scores of a query.
SMALL = 1e-2


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference, relative to the expected tensor."""
    expected = expected.double().cpu()
    return ((actual.double().cpu() - expected).norm() / expected.norm()).item()


def errors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Frobenius norm of the difference of each gradient, relative to the expected one plus SMALL of the largest one."""
    norms = {key: gradient.double().norm().item() for key, gradient in expected.items()}
    floor = SMALL * max(norms.values())
    return {key: (actual[key].double() - expected[key].double()).norm().item() / (norms[key] + floor) for key in norms}


def make_decoder(name: str) -> Decoder:
    family, _ = CASES[name]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}Config")
    return build_pair(name)[1]


def tokens(decoder: Decoder) -> torch.Tensor:
    return torch.randint(0, decoder.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))


def gradients(decoder: Decoder, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    for _, router in routers(decoder):  # as a train step does: the counts of the last step may be on another device
        router.balance.reset()
    weights = torch.full(ids.shape, -1 / ids.numel(), device=ids.device)
    total, _ = decoder(ids, labels=ids.roll(-1, dims=1), token_weights=weights)
    total.backward()
    grads = {name: parameter.grad.cpu() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad(set_to_none=True)
    return grads


@pytest.mark.parametrize("name", CASES)
def test_float32(name, device):
    decoder = make_decoder(name)
    ids = tokens(decoder)
    with torch.no_grad():
        expected = decoder(ids)
    expected_gradients = gradients(decoder, ids)
    decoder.to(device)
    with torch.no_grad():
        assert (decoder(ids.to(device)).cpu() - expected).abs().max() <= 1e-4
    for key, error in errors(gradients(decoder, ids.to(device)), expected_gradients).items():
        assert error <= 1e-4, key


# Rounding decides which experts a token goes to where two are as good.
WITHOUT_CHOICE = [
    name
    for name, (_, changes) in CASES.items()
    if "num_experts_per_tok" not in changes and "num_local_experts" not in changes
]


@pytest.mark.parametrize("name", WITHOUT_CHOICE)
def test_bfloat16_is_as_near_to_float32_as_on_the_cpu(name, device):
    decoder = make_decoder(name)
    ids = tokens(decoder)
    with torch.no_grad():
        exact = decoder(ids)
    exact_gradients = gradients(decoder, ids)
    decoder.compute_dtype = torch.bfloat16
    with torch.no_grad():
        on_cpu = relative(decoder(ids), exact)
    # The error of one small tensor is chance, and may be near 0 on the CPU: the largest of the model is no such chance.
    most = max(errors(gradients(decoder, ids), exact_gradients).values())
    decoder.to(device)
    with torch.no_grad():
        assert relative(decoder(ids.to(device)), exact) <= 2 * on_cpu + 1e-3
    for key, error in errors(gradients(decoder, ids.to(device)), exact_gradients).items():
        assert error <= 2 * most + 1e-2, key
