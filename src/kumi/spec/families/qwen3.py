"""Qwen3, the dense models: Llama with RMSNorm on every query and key head, and a sliding window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import (
    build_llama_like,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
)
from kumi.spec.families._shared.sliding_windows import WINDOW_KEYS, window_keys, windows_from_values
from kumi.spec.model import ModelSpec

ARCHITECTURE = "Qwen3ForCausalLM"
KEYS = {
    **DECODER,
    "rms_norm_eps": Key("number", 1e-6),
    "max_position_embeddings": Key("integer", 32_768),
    **WINDOW_KEYS,
    "num_key_value_heads": Key("integer or null", 32),
    "head_dim": Key("integer", 128),
    "attention_bias": Key("true or false", False),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "qwen3" describes."""
    values = read("qwen3", config, KEYS)
    bias = values["attention_bias"]
    return build_llama_like(
        "qwen3", values, windows=windows_from_values(values), qkv_bias=bias, out_bias=bias, qk_norm=True
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    own = {"attention_bias": first_grouped_attention(spec).qkv_bias}
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | own | window_keys(spec)
