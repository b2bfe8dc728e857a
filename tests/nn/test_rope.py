"""Rotations of every kind against those of transformers."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
import transformers

from kumi.nn import rope
from kumi.nn.attention.attention_context import cos_sin_tables, document_lengths
from kumi.spec.model import Attention, Rope

LENGTH, HEAD = 24, 16
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "partial_rotary_factor": 0.5,
    "attention_factor": 1.3,
}
LONGROPE = Rope(
    1000.0,
    "longrope",
    short_factor=(1.0, 1.25, 1.5, 2.0),
    long_factor=(2.0, 3.0, 5.0, 8.0),
    partial_rotary_factor=0.5,
    attention_factor=1.3,
)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def transformers_rotation(family, parameters, **changes):
    """A function of (x (B, S, heads, E), position ids (B, S)) that turns x as the family does."""
    name = {"GPTNeoX": "gpt_neox"}.get(family, family.lower())
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(transformers, f"{family}Config")(**SIZES | changes, rope_parameters=parameters, pad_token_id=0)
    made = getattr(module, f"{family}RotaryEmbedding")(config)

    def rotate(x, position_ids):
        heads = x.transpose(1, 2)
        return module.apply_rotary_pos_emb(heads, heads, *made(x.float(), position_ids))[0].transpose(1, 2)

    return rotate


PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
CASES = {
    "partial": (Rope(1000.0, partial_rotary_factor=0.5), ("Phi3", PLAIN | {"partial_rotary_factor": 0.5}, {})),
    "a quarter": (Rope(1000.0, partial_rotary_factor=0.25), ("GPTNeoX", PLAIN | {"partial_rotary_factor": 0.25}, {})),
    "neighbours": (Rope(1000.0, interleave=True), ("Cohere2", PLAIN, {})),
    "neighbours, partial": (
        Rope(1000.0, partial_rotary_factor=0.5, interleave=True),
        ("Glm4", PLAIN | {"partial_rotary_factor": 0.5}, {"head_dim": HEAD}),
    ),
    "long, short rows": (
        replace(LONGROPE, original_max_position_embeddings=LENGTH),
        ("Phi3", LONG, {"original_max_position_embeddings": LENGTH}),
    ),
    "long, long rows": (
        replace(LONGROPE, original_max_position_embeddings=LENGTH - 1),
        ("Phi3", LONG, {"original_max_position_embeddings": LENGTH - 1}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    spec, (family, parameters, changes) = CASES[name]
    theirs = transformers_rotation(family, parameters, **changes)
    x = torch.randn(2, LENGTH, 3, HEAD, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH).expand(2, -1)
    attention = Attention(4, 2, HEAD, spec)
    (tables,) = cos_sin_tables([attention], positions, lambda: LENGTH).values()
    turned = rope.rotate(x, *tables, interleave=spec.interleave)
    torch.testing.assert_close(turned, theirs(x, positions), rtol=1e-5, atol=2e-5)
    assert tables[0].shape == (2, LENGTH, 1, attention.rotary_dim)
    # Partial RoPE leaves the other dims unchanged.
    assert torch.equal(turned[..., attention.rotary_dim :], x[..., attention.rotary_dim :])


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("size", [4, 6])
def test_gradients(size, interleave):
    spec = Rope(100.0, interleave=interleave)
    cos, sin = (table.double() for table in rope.cos_sin(spec, size, torch.arange(4).expand(1, -1)))
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rope.rotate(x, cos, sin, interleave=interleave), x)


def test_the_length_of_its_document_decides_about_every_position():
    """Whatever row it is packed in, and whatever part of it a device has."""
    spec = replace(LONGROPE, original_max_position_embeddings=12)
    place = torch.arange(4)[None]
    short, long = (rope.cos_sin(spec, 8, place, length)[0] for length in (12, 13))
    assert not torch.equal(short, long)
    mixed = rope.cos_sin(spec, 8, place, torch.tensor([[12, 13, 4, 100]]))[0]
    assert torch.equal(mixed, torch.stack((short[:, 0], long[:, 1], short[:, 2], long[:, 3]), dim=1))


def test_lengths_of_documents():
    ids = torch.tensor([[3, 3, 3, 7, 7, 3], [3, 5, 5, 5, 5, 0]])
    assert document_lengths(ids, ids).tolist() == [[3, 3, 3, 2, 2, 1], [1, 4, 4, 4, 4, 1]]
    assert document_lengths(ids, None) == 6
