"""OLMo 2: norms follow attention and MLP instead of preceding them (arXiv:2501.00656)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    layers_with_windows,
)
from kumi.spec.model import MLP, ModelSpec
from kumi.spec.weight_rules import Rename, Weights

ARCHITECTURE = "Olmo2ForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 2_048),
    "num_key_value_heads": Key("integer or null", None),
    "attention_bias": Key("true or false", False),
    "rms_norm_eps": Key("number", 1e-5),
    "pad_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 50279),
}
# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (Rename("self_attn_post_norm", "post_attention_layernorm"), Rename("mlp_post_norm", "post_feedforward_layernorm"))
)


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "olmo2" describes."""
    values = read("olmo2", config, KEYS)
    check_sizes(values)
    bias, windows = values["attention_bias"], [None] * values["num_hidden_layers"]
    layers = layers_with_windows(
        "olmo2",
        values,
        windows,
        MLP(values["intermediate_size"]),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        qk_norm_whole=True,
    )
    layers = [replace(layers[0], pre_norms=False, post_norms=True)] * len(layers)
    return build_model("olmo2", values, layers, weights=WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    own = {"attention_bias": first_grouped_attention(spec).qkv_bias}
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | own
