"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections, and a sliding window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import build_llama_like, common_to_hf, first_dense_mlp
from kumi.spec.families._shared.sliding_windows import WINDOW_KEYS, window_keys, windows_from_values
from kumi.spec.model import ModelSpec

ARCHITECTURE = "Qwen2ForCausalLM"
KEYS = {
    **DECODER,
    **WINDOW_KEYS,
    "rms_norm_eps": Key("number", 1e-6),
    "max_position_embeddings": Key("integer", 32_768),
    "num_key_value_heads": Key("integer or null", 32),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "qwen2" describes."""
    values = read("qwen2", config, KEYS)
    return build_llama_like("qwen2", values, windows=windows_from_values(values), qkv_bias=True)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | window_keys(spec)
