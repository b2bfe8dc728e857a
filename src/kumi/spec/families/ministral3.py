"""Ministral 3, the text model: Mistral with YaRN and position-dependent query scaling (llama_4_scaling_beta)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
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
from kumi.spec.model import MLP, LayerSpec, ModelSpec, Rope

ARCHITECTURE = "Ministral3ForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 262_144),
    "num_key_value_heads": Key("integer or null", 8),
    "head_dim": Key("integer or null", 128),
    "rms_norm_eps": Key("number", 1e-5),
    "sliding_window": Key("integer or null", None),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
    "pad_token_id": Key("integer or null", 11),
}
_SCALING_BETA = "llama_4_scaling_beta"
# Defaults of transformers.
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _SCALING_BETA: 0.1,
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "ministral3" describes."""
    values = read("ministral3", config, KEYS)
    check_sizes(values)
    attention = grouped_attention(values, _rope(values), sliding_window=values["sliding_window"])
    layer = LayerSpec(attention, MLP(values["intermediate_size"]))
    return build_model("ministral3", values, [layer] * values["num_hidden_layers"])


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    rope, written = (
        first_grouped_attention(spec).rope,
        common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size),
    )
    if rope is None or written["rope_scaling"] is None:
        raise ModelError("a ministral3 config.json cannot express a model without YaRN; use mistral")
    written["rope_scaling"] |= {_SCALING_BETA: rope.query_growth}
    return written | {"sliding_window": first_grouped_attention(spec).sliding_window}


def _rope(values: Mapping[str, Any]) -> Rope:
    """Return the RoPE; its table also has llama_4_scaling_beta, and repeats max_position_embeddings."""
    tables = {key: dict(values[key]) for key in ("rope_scaling", "rope_parameters") if values[key]}
    tables = tables or {"rope_parameters": dict(_DEFAULT_ROPE)}
    betas = {float(table.pop(_SCALING_BETA, 0)) for table in tables.values()}
    for table in tables.values():
        table.pop("max_position_embeddings", None)
    rope = rope_config.rope_from_hf("ministral3", {**values, **tables})
    if rope.scaling != "yarn" or len(betas) != 1 or min(betas) < 0:
        raise ModelError(
            f"config.json: rope_parameters={values['rope_parameters']!r} and rope_scaling="
            f"{values['rope_scaling']!r} of a ministral3 model must be YaRN's, with one {_SCALING_BETA} of 0 or "
            f"more"
        )
    return replace(rope, query_growth=betas.pop())
