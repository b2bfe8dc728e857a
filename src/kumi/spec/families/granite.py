"""Granite 3, the dense models: Llama with fixed factors on embeddings, residual branches, scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
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

ARCHITECTURE = "GraniteForCausalLM"
_FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 2_048),
    **{name: Key("number", 1.0) for name in _FACTORS},
    "num_key_value_heads": Key("integer or null", None),
    "attention_bias": Key("true or false", False),
    "mlp_bias": Key("true or false", False),
    "rms_norm_eps": Key("number", 1e-6),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "granite" describes."""
    values = read("granite", config, KEYS)
    check_sizes(values)
    for name in _FACTORS:
        if values[name] <= 0:
            raise ModelError(f"config.json: {name}={values[name]} of a granite model must be above 0; correct it")
    bias, windows = values["attention_bias"], [None] * values["num_hidden_layers"]
    mlp = MLP(values["intermediate_size"], values["mlp_bias"])
    layers = layers_with_windows(
        "granite", values, windows, mlp, qkv_bias=bias, out_bias=bias, score_scale=float(values["attention_multiplier"])
    )
    return build_model(
        "granite",
        values,
        layers,
        embedding_scale=float(values["embedding_multiplier"]),
        residual_scale=float(values["residual_multiplier"]),
        logit_scale=1 / values["logits_scaling"],
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    attention, mlp = first_grouped_attention(spec), first_dense_mlp(spec)
    scale = attention.head_dim**-0.5 if attention.score_scale is None else attention.score_scale
    return common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | {
        "attention_bias": attention.qkv_bias,
        "mlp_bias": mlp.bias,
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_scale,
        "attention_multiplier": scale,
        "logits_scaling": 1 / spec.logit_scale,
    }
