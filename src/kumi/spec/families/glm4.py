"""GLM-4-0414: norms before and after attention and MLP, and interleaved RoPE on half of every head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.spec.families._shared import rope_config
from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    grouped_attention,
)
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.weight_rules import Rename, Rows, Weights

ARCHITECTURE = "Glm4ForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 131_072),
    "num_key_value_heads": Key("integer", 2),
    "head_dim": Key("integer", 128),
    "partial_rotary_factor": Key("number or null", None),
    "rms_norm_eps": Key("number", 1.5625e-7),
    "attention_bias": Key("true or false", True),
    "eos_token_id": Key("integer or list of integers or null", [151329, 151336, 151338]),
    "pad_token_id": Key("integer or null", 151329),
}
# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (
        Rename("self_attn_post_norm", "post_self_attn_layernorm"),
        Rename("mlp_post_norm", "post_mlp_layernorm"),
        Rows(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
    )
)


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "glm4" describes."""
    values = read("glm4", config, KEYS)
    check_sizes(values)
    rope = rope_config.partial_rope_from_hf("glm4", values, values["partial_rotary_factor"], 0.5)
    attention = grouped_attention(values, replace(rope, interleave=True), qkv_bias=values["attention_bias"])
    layer = LayerSpec(attention, MLP(values["intermediate_size"]), post_norms=True)
    return build_model("glm4", values, [layer] * values["num_hidden_layers"], weights=WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    attention = first_grouped_attention(spec)
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | {
        "partial_rotary_factor": 1.0 if attention.rope is None else attention.rope.partial_rotary_factor,
        "attention_bias": attention.qkv_bias,
    }
