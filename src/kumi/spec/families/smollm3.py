"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config, sliding_windows
from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    layers_with_windows,
    read_layer_types,
)
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec

ARCHITECTURE = "SmolLM3ForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 32_768),
    "num_key_value_heads": Key("integer or null", 4),
    "attention_bias": Key("true or false", False),
    "mlp_bias": Key("true or false", False),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer or null", 128000),
    "eos_token_id": Key("integer or list of integers or null", 128001),
    "pad_token_id": Key("integer or null", 128004),
    # A 1 for each layer with RoPE; older configs have the interval of layers without RoPE.
    "no_rope_layers": Key("list or null", None),
    "no_rope_layer_interval": Key("integer", 4),
    "use_sliding_window": Key("true or false", False),
    "sliding_window": Key("integer or null", None),
    "layer_types": Key("list or null", None),
    # Published, but not read by transformers.
    "max_window_layers": Key("integer or null", None),
    "pretraining_tp": Key("integer or null", None),
}
_DEFAULT_THETA = 2_000_000.0


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "smollm3" describes."""
    values = rope_config.with_default_theta(read("smollm3", config, KEYS), _DEFAULT_THETA)
    check_sizes(values)
    has_rope, bias = _has_rope(values), values["attention_bias"]
    mlp = MLP(values["intermediate_size"], values["mlp_bias"])
    layers = layers_with_windows("smollm3", values, _windows(values, has_rope), mlp, qkv_bias=bias, out_bias=bias)
    return build_model(
        "smollm3",
        values,
        [layer if rotates else _without_rope(layer) for layer, rotates in zip(layers, has_rope, strict=True)],
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    window, mlp = sliding_windows.first_window(spec), first_dense_mlp(spec)
    return common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | {
        "attention_bias": first_grouped_attention(spec).qkv_bias,
        "mlp_bias": mlp.bias,
        "no_rope_layers": [int(layer.attends is not None and layer.attends.rope is not None) for layer in spec.layers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": sliding_windows.layer_types(spec),
    }


def _has_rope(values: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has RoPE."""
    count, rope_flags, interval = (
        values["num_hidden_layers"],
        values["no_rope_layers"],
        values["no_rope_layer_interval"],
    )
    if rope_flags is None:
        if interval < 1:
            raise ModelError(f"config.json: no_rope_layer_interval={interval} must be 1 or more; correct it")
        return [bool((index + 1) % interval) for index in range(count)]
    if len(rope_flags) != count or any(flag not in (0, 1) for flag in rope_flags):
        raise ModelError(
            f"config.json: no_rope_layers={rope_flags!r} must have a 0 (no RoPE) or 1 for each of the {count} layers"
        )
    return [bool(flag) for flag in rope_flags]


def _without_rope(layer: LayerSpec) -> LayerSpec:
    """Return `layer` without RoPE."""
    assert isinstance(layer.attention, Attention)
    return replace(layer, attention=replace(layer.attention, rope=None))


def _windows(values: Mapping[str, Any], has_rope: list[bool]) -> list[int | None]:
    """Return each layer's window. Without `layer_types`, the layers without RoPE have a window."""
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if values["layer_types"] is None:
        return [None if rotates else window for rotates in has_rope]
    slides = [kind == "sliding_attention" for kind in read_layer_types(values)]
    if window is None and any(slides):
        raise ModelError(
            f"config.json: layer_types of a smollm3 model has sliding_attention, but use_sliding_window="
            f"{values['use_sliding_window']} and sliding_window={values['sliding_window']}; set both, or "
            f"make every layer full_attention"
        )
    return [window if slide else None for slide in slides]
