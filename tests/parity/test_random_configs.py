"""Random configurations of the dense families: logits against transformers, and files there and back bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import rounding

from kumi.convert import convert
from tiny_models import LLAMA3, YARN, decoder_of, in_float64, reference_of
from weights import read_tensors

LENGTH = 24
ROTATIONS = {
    "default": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "llama3": LLAMA3,
    "yarn": YARN,
}
# How many heads have a size of their own beside that of the hidden state, which other families derive it from.
OWN_HEAD_DIM = ("Llama", "Mistral", "Qwen3", "Gemma", "Gemma2", "Gemma3Text", "Glm4", "SeedOss")
# The keys of biases that a config can ask for.
BIASES = {
    "Llama": ("attention_bias", "mlp_bias"),
    "Qwen3": ("attention_bias",),
    "Gemma2": ("attention_bias",),
    "Gemma3Text": ("attention_bias",),
    "Olmo2": ("attention_bias",),
    "Granite": ("attention_bias", "mlp_bias"),
    "SmolLM3": ("attention_bias", "mlp_bias"),
    "Cohere2": ("attention_bias",),
    "Starcoder2": ("use_bias",),
    "Gemma": ("attention_bias",),
    "Glm4": ("attention_bias",),
    "Olmo3": ("attention_bias",),
    "SeedOss": ("attention_bias", "attention_out_bias", "mlp_bias"),
}
# Whether all layers have one window, or each its own kind.
ONE_WINDOW = ("Mistral", "Phi3", "Starcoder2")
KINDS_OF_LAYERS = ("Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Olmo3", "SmolLM3", "Cohere2")
FAMILIES = (
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Phi3",
    "Gemma2",
    "Gemma3Text",
    "Olmo2",
    "Granite",
    "SmolLM3",
    "Cohere2",
    "Starcoder2",
    "Gemma",
    "Glm4",
    "Olmo3",
    "SeedOss",
)


@st.composite
def changes_of(draw, family):
    """Draw changes of the sizes of tiny models."""
    layers = draw(st.integers(1, 3))
    kv_heads, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, heads = draw(st.sampled_from((4, 8, 12))), kv_heads * queries
    changes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(2, 70)),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if family in OWN_HEAD_DIM:
        changes["head_dim"] = draw(st.sampled_from((4, 8, 12)))
    if family == "Qwen3" or (family == "Gemma3Text" and changes["hidden_size"] % heads):
        changes["head_dim"] = head_dim
    changes |= {key: draw(st.booleans()) for key in BIASES.get(family, ())}
    return changes | draw(rotations(family)) | draw(windows(family, layers))


@st.composite
def rotations(draw, family):
    if family == "Phi3":
        return {"rope_parameters": ROTATIONS["default"] | {"partial_rotary_factor": draw(st.sampled_from((0.5, 1.0)))}}
    kind = draw(st.sampled_from(sorted(ROTATIONS)))
    if family in ("Gemma3Text", "Olmo3"):
        tables = {"full_attention": dict(ROTATIONS[kind]), "sliding_attention": dict(ROTATIONS["default"])}
        return {"rope_parameters": tables}
    return {"rope_parameters": dict(ROTATIONS[kind])}


@st.composite
def windows(draw, family, layers):
    window = draw(st.integers(1, LENGTH + 2))
    if family in ONE_WINDOW:
        return {"sliding_window": window if draw(st.booleans()) else None}
    if family not in KINDS_OF_LAYERS:
        return {}
    kinds = draw(st.lists(st.sampled_from(("full_attention", "sliding_attention")), min_size=layers, max_size=layers))
    keys = {"layer_types": kinds, "sliding_window": window}
    if family in ("Qwen2", "Qwen3", "SmolLM3"):
        keys["use_sliding_window"] = "sliding_attention" in kinds
    if family == "SmolLM3":
        keys["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
    return keys


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 25)
def test_a_random_configuration(family, data):
    check(family, data.draw(changes_of(family)))


# A hidden state of four numbers whose terms nearly cancel: the norm after it makes it large again, and with it the
# rounding error. Other draws of this shape are up to 1e-4 of the largest logit off, on some CPUs and not on others.
CANCELLING = {
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "hidden_size": 4,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 30,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_parameters": {"full_attention": LLAMA3, "sliding_attention": ROTATIONS["default"]},
    "sliding_window": 12,
    "layer_types": ["full_attention", "full_attention", "sliding_attention"],
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def test_norms_over_four_numbers():
    check("Gemma3Text", CANCELLING)


def check(family, changes):
    """Assert that transformers' model of `family` with `changes` and kumi's give the same logits, and that its files
    come back as they were."""
    reference = reference_of(family, changes)
    ids = torch.randint(0, changes["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with in_float64():
        wide = reference_of(family, changes)
        wide.load_state_dict(reference.state_dict())
        expected, logits = logits_of(wide, ids), decoder_of(wide)(ids)
    # BLOOM's own GELU has eight digits of sqrt(2 / pi).
    least = 1e-8 if family == "Bloom" else 1e-10
    assert (logits - expected).abs().max() <= least * max(1.0, float(expected.abs().max()))
    expected, logits = logits_of(reference, ids), decoder_of(reference)(ids)
    difference = (logits - expected).abs().max()
    if difference > 1e-5 * max(1.0, float(expected.abs().max())):
        assert difference <= rounding(wide, LENGTH, lambda model: {"logits": logits_of(model, ids)})["logits"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference.save_pretrained(folder / "source")
        convert(folder / "source", folder / "native", to="kumi", verify=False)
        convert(folder / "native", folder / "back", to="hf", verify=False)
        source, back = dict(read_tensors(folder / "source")), dict(read_tensors(folder / "back"))
    assert source.keys() == back.keys()
    assert all(value.equal(back[key]) for key, value in source.items())


def logits_of(reference, ids):
    with torch.no_grad():
        return reference(input_ids=ids, use_cache=False).logits
