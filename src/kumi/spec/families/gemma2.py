"""Gemma 2 (arXiv:2408.00118): every other layer has a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.spec.families._shared import gemma_layers
from kumi.spec.families._shared.config_keys import Key, read, require_values
from kumi.spec.families._shared.decoder_config import check_sizes, layers_with_windows, read_layer_types
from kumi.spec.model import ModelSpec

ARCHITECTURE = "Gemma2ForCausalLM"
_BIDIRECTIONAL = "use_bidirectional_attention"
KEYS = {
    **gemma_layers.GEMMA_KEYS,
    "max_position_embeddings": Key("integer", 8_192),
    "sliding_window": Key("integer", 4096),
    "sliding_window_size": Key("integer or null", None),
    "attn_logit_softcapping": Key("number or null", 50.0),
    "final_logit_softcapping": Key("number or null", 30.0),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "gemma2" describes."""
    values = read("gemma2", config, KEYS)
    check_sizes(values)
    require_values(
        "gemma2", {**values, _BIDIRECTIONAL: bool(values[_BIDIRECTIONAL])}, use_bidirectional_attention=False
    )
    bias, types = values["attention_bias"], values["layer_types"]
    if types is not None:
        types = read_layer_types(values)
    slides = [
        not index % 2 if types is None else types[index] == "sliding_attention"
        for index in range(values["num_hidden_layers"])
    ]
    windows = [values["sliding_window"] if slide else None for slide in slides]
    layers = layers_with_windows(
        "gemma2",
        values,
        windows,
        gemma_layers.gemma_mlp("gemma2", values),
        qkv_bias=bias,
        out_bias=bias,
        **gemma_layers.score_fields(values),
    )
    return gemma_layers.gemma_model("gemma2", values, [replace(layer, post_norms=True) for layer in layers])


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    return gemma_layers.gemma_to_hf(spec, ARCHITECTURE)
