"""Gemma 3, the text model (arXiv:2503.19786): five of six layers have a sliding window and another RoPE base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared import gemma_layers, rope_config
from kumi.spec.families._shared.config_keys import Key, read, require_values
from kumi.spec.families._shared.decoder_config import check_sizes, grouped_attention, read_layer_types
from kumi.spec.model import LayerSpec, ModelSpec, Rope

ARCHITECTURE = "Gemma3ForCausalLM"
KEYS = {
    **gemma_layers.GEMMA_KEYS,
    "max_position_embeddings": Key("integer", 131_072),
    "sliding_window": Key("integer", 4096),
    "sliding_window_pattern": Key("integer or null", None),
    "_sliding_window_pattern": Key("integer or null", None),
    "rope_local_base_freq": Key("number or null", None),
    "use_bidirectional_attention": Key("true or false", False),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "gemma3_text" describes."""
    values = read("gemma3_text", config, KEYS)
    check_sizes(values)
    require_values("gemma3_text", values, use_bidirectional_attention=False)
    bias, mlp, ropes = values["attention_bias"], gemma_layers.gemma_mlp("gemma3_text", values), _ropes(values)
    layer = {
        kind: LayerSpec(
            grouped_attention(
                values,
                ropes[kind],
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=True,
                sliding_window=window,
                **gemma_layers.score_fields(values),
            ),
            mlp,
            post_norms=True,
        )
        for kind, window in (("sliding_attention", values["sliding_window"]), ("full_attention", None))
    }
    return gemma_layers.gemma_model("gemma3_text", values, [layer[kind] for kind in _types(values)])


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`: the full-attention RoPE and the base of the sliding-window RoPE."""
    own: dict[str, Any] = {"use_bidirectional_attention": False}
    ropes = {layer.window is not None: layer.attends.rope for layer in spec.layers if layer.attends is not None}
    if (full_rope := ropes.get(False)) is not None:
        own |= rope_config.rope_to_hf(full_rope)
    if (window_rope := ropes.get(True)) is not None:
        own |= {"rope_local_base_freq": window_rope.rope_theta}
    return gemma_layers.gemma_to_hf(spec, ARCHITECTURE) | own


def _types(values: Mapping[str, Any]) -> list[str]:
    """Return each layer's type: every sixth has full attention, unless the config says otherwise."""
    if values["layer_types"] is not None:
        return read_layer_types(values)
    pattern = values["sliding_window_pattern"] or values["_sliding_window_pattern"] or 6
    return [
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(values["num_hidden_layers"])
    ]


def _ropes(values: Mapping[str, Any]) -> dict[str, Rope]:
    """Return the RoPE of both layer types, from one table each or, in older configs, from two bases."""
    kinds, tables = ("sliding_attention", "full_attention"), values["rope_parameters"]
    if tables is None:
        window_values = {**values, "rope_theta": values["rope_local_base_freq"] or 10_000.0, "rope_scaling": None}
        full_values = {**values, "rope_theta": values["rope_theta"] or 1_000_000.0}
        ropes = (rope_config.rope_from_hf("gemma3_text", each) for each in (window_values, full_values))
        return dict(zip(kinds, ropes, strict=True))
    return rope_config.ropes_by_layer_type("gemma3_text", values, kinds)
