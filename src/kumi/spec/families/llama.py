"""Llama 2, 3, 3.1, 3.2 and 3.3 (text), and the many models that share their architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared.config_keys import DECODER, Key, check_agrees, read
from kumi.spec.families._shared.decoder_config import (
    build_llama_like,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
)
from kumi.spec.model import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"
KEYS = {
    **DECODER,
    "rms_norm_eps": Key("number", 1e-6),
    "max_position_embeddings": Key("integer", 2_048),
    "num_key_value_heads": Key("integer or null", None),
    "attention_bias": Key("true or false", False),
    "mlp_bias": Key("true or false", False),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
    # In the first configs, a copy of max_position_embeddings.
    "max_sequence_length": Key("integer or null", None),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "llama" describes."""
    values = read("llama", config, KEYS)
    check_agrees("llama", values, max_sequence_length=values["max_position_embeddings"])
    bias = values["attention_bias"]
    windows = [None] * values["num_hidden_layers"]
    return build_llama_like("llama", values, windows=windows, qkv_bias=bias, out_bias=bias, mlp_bias=values["mlp_bias"])


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    mlp = first_dense_mlp(spec)
    own = {"attention_bias": first_grouped_attention(spec).qkv_bias, "mlp_bias": mlp.bias, "pretraining_tp": 1}
    return common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | own
