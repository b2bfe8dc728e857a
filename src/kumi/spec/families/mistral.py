"""Mistral 7B and the models that share its architecture: Llama with an optional sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import build_llama_like, common_to_hf, first_dense_mlp, read_layer_types
from kumi.spec.model import ModelSpec

ARCHITECTURE = "MistralForCausalLM"
KEYS = {
    **DECODER,
    "rms_norm_eps": Key("number", 1e-6),
    "max_position_embeddings": Key("integer", 131_072),
    "num_key_value_heads": Key("integer or null", 8),
    "sliding_window": Key("integer or null", 4096),
    "layer_types": Key("list or null", None),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "mistral" describes."""
    values = read("mistral", config, KEYS)
    window, layers = values["sliding_window"], values["num_hidden_layers"]
    if values["layer_types"] is not None:
        kind = "full_attention" if window is None else "sliding_attention"
        if any(layer_type != kind for layer_type in read_layer_types(values)):
            raise ModelError(
                f"config.json: layer_types contradicts sliding_window={window}, which makes every layer "
                f"of a mistral model {kind!r}; remove layer_types"
            )
    return build_llama_like("mistral", values, windows=[window] * layers)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | {
        "sliding_window": spec.layers[0].window
    }
