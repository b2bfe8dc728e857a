"""Keys that a config.json leaves out have transformers' defaults, and old spellings their old meaning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from kumi.errors import ModelError
from kumi.spec import families
from kumi.spec.families._shared.config_keys import REQUIRED

# Sizes that no config leaves out. Heads enough for the numbers of key heads that are assumed where none is given.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 128,
    "n_embd": 64,
    "n_layer": 8,
    "n_head": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BESIDE = {
    **{name: {"num_experts": 16} for name in ("olmoe", "qwen2_moe", "qwen3_moe")},
    "gpt_oss": {"num_local_experts": 16},
    "bloom": {"n_embed": 64, "n_layer": 8, "n_head": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"]},
}
# transformers has no class for the first, and none for the second whose parts may be left out.
WITH_CLASS = [name for name in families.FAMILIES if name not in ("kimi_k2", "nemotron_h_omni")]


def least(name: str) -> dict[str, object]:
    """The keys without which the family `name` refuses a config."""
    module = families.FAMILIES[name]
    vision_language = getattr(module, "_FAMILY", None)
    keys = module.KEYS if vision_language is None else next(iter(vision_language.text_families.values())).KEYS
    text = {key: SIZES[key] for key, said in keys.items() if said.default is REQUIRED} | BESIDE.get(name, {})
    return text if vision_language is None else {"text_config": text, "vision_config": {}}


@pytest.mark.parametrize("name", WITH_CLASS)
def test_what_is_left_out_is_what_transformers_assumes(name):
    written = CONFIG_MAPPING[name](**least(name)).to_dict() | {"model_type": name, "architectures": None}
    # Whether files hold layers that predict further ahead is theirs to say; neither computes them.
    written.pop("num_nextn_predict_layers", None)
    if name == "mistral3":
        # Its class ties the head by default; the published models, without the key, have a head.
        written.pop("tie_word_embeddings")
    ours, theirs = (families.from_hf(config) for config in (least(name) | {"model_type": name}, written))
    assert replace(ours, carried_config="") == replace(theirs, carried_config="")


def test_all_that_is_missing_is_named_at_once():
    with pytest.raises(
        ModelError,
        match=r"'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', "
        r"'num_attention_heads' are missing; a llama model",
    ):
        families.from_hf({"model_type": "llama"})


def spoken(name: str, **more: object) -> families.ModelSpec:
    return families.from_hf({"model_type": name, **least(name), **more})


def test_keys_that_no_program_reads_are_accepted_where_they_are_true():
    assert spoken("gpt_neox", num_key_value_heads=128) == spoken("gpt_neox")
    assert spoken("falcon", intermediate_size=4096) == spoken("falcon")
    assert spoken("llama", max_sequence_length=2048, attention_dropout=0.1) == spoken("llama")
    for name, key, wrong in (
        ("gpt_neox", "num_key_value_heads", 8),
        ("falcon", "intermediate_size", 96),
        ("llama", "max_sequence_length", 4096),
    ):
        with pytest.raises(ModelError, match=f"{key}={wrong} of a {name} model contradicts the rest"):
            spoken(name, **{key: wrong})


def test_spellings_of_the_past():
    assert spoken("llama", architectures=["LLaMAForCausalLM"]) == spoken("llama", architectures=["LlamaForCausalLM"])
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128}
    assert spoken("llama", rope_scaling=yarn | {"finetuned": True}) == spoken("llama", rope_scaling=yarn)
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long, *old = (spoken("phi3", rope_scaling={"type": kind, **factors}) for kind in ("longrope", "su", "yarn"))
    assert old == [long, long]
    assert long.layers[0].attention.rope.scaling == "longrope"
    with pytest.raises(ModelError, match="rope type 'su' of a llama model is not supported"):
        spoken("llama", rope_scaling={"type": "su", **factors})


def test_windows_in_another_order_are_for_readers_of_layer_types_alone():
    kinds = ["full_attention", "sliding_attention"] * 4
    window = {"use_sliding_window": True, "sliding_window": 16}
    mixed = spoken("qwen3", layer_types=kinds, **window)
    written = families.to_hf(mixed)
    assert "max_window_layers" not in written
    assert written["layer_types"] == kinds
    assert families.from_hf(written) == mixed
    last = families.to_hf(spoken("qwen3", layer_types=sorted(kinds), **window))
    assert last["max_window_layers"] == 4
    assert families.to_hf(spoken("qwen3"))["max_window_layers"] == 8
