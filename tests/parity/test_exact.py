"""Families against transformers with both in float64, and against transformers without positions.

Weights are large enough for positions to matter: a wrong rotation would not hide behind uniform attention.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tiny_models import build_reference, decoder_of, in_float64

NAMES = (
    "gemma",
    "gemma-biases",
    "glm4",
    "glm4-whole",
    "olmo3",
    "olmo3-yarn",
    "phi3-longrope-partial",
    "qwen2-moe",
    "qwen2-moe-sparse",
    "qwen3-moe",
    "seed-oss",
    "seed-oss-biases",
)


def _unturned(module, inputs, tables):
    cos, sin = tables
    return torch.ones_like(cos), torch.zeros_like(sin)


@pytest.mark.parametrize("name", NAMES)
def test_logits_in_float64_and_float32(name):
    check(partial(build_reference, name))


@torch.no_grad()
def check(make):
    """Assert that the model of transformers that `make` makes and kumi's give the same logits, within 1e-10 of the
    largest in float64 and 1e-5 in float32, and that positions matter to them."""
    reference = make()
    ids = torch.randint(0, reference.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with in_float64():
        wide = make()
        wide.load_state_dict(reference.state_dict())
        expected = wide(input_ids=ids, use_cache=False).logits
        largest = expected.abs().max()
        assert (decoder_of(wide)(ids) - expected).abs().max() <= 1e-10 * largest
    assert (decoder_of(reference)(ids) - expected).abs().max() <= 1e-5 * largest
    for module in reference.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_hook(_unturned)
    unturned = reference(input_ids=ids, use_cache=False).logits
    assert (unturned - expected).abs().max() > 1e-2 * largest, "a wrong rotation could hide"
