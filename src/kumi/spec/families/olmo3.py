"""OLMo 3: OLMo 2 with sliding windows in three layers of four; only the other layers have RoPE scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families import olmo2
from kumi.spec.families._shared import rope_config, sliding_windows
from kumi.spec.families._shared.config_keys import Key, read
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    grouped_attention,
    read_layer_types,
)
from kumi.spec.model import MLP, LayerSpec, ModelSpec, Rope

ARCHITECTURE = "Olmo3ForCausalLM"
_LAYER_TYPES = ("sliding_attention", "full_attention")
# Base of sliding-window layers in transformers 5 if a config has one base for all layers.
_DEFAULT_THETA = 500_000.0
KEYS = {**olmo2.KEYS, "sliding_window": Key("integer", 4096), "layer_types": Key("list or null", None)}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "olmo3" describes."""
    values = read("olmo3", config, KEYS)
    check_sizes(values)
    types, mlp, bias = _types(values), MLP(values["intermediate_size"]), values["attention_bias"]
    width = {"sliding_attention": values["sliding_window"], "full_attention": None}
    layer = {
        kind: LayerSpec(
            grouped_attention(
                values, rope, qkv_bias=bias, out_bias=bias, qk_norm=True, qk_norm_whole=True, sliding_window=width[kind]
            ),
            mlp,
            pre_norms=False,
            post_norms=True,
        )
        for kind, rope in _ropes(values, types).items()
    }
    return build_model("olmo3", values, [layer[kind] for kind in types], weights=olmo2.WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`: transformers 4 reads one base and scaling, transformers 5 two tables."""
    ropes = {layer.window is not None: layer.attends.rope for layer in spec.layers if layer.attends is not None}
    own = {
        "attention_bias": first_grouped_attention(spec).qkv_bias,
        "sliding_window": sliding_windows.first_window(spec) or 4096,
        "layer_types": sliding_windows.layer_types(spec),
    }
    window_rope, full_rope = ropes.get(True), ropes.get(False) or ropes.get(True)
    if full_rope is not None:
        own |= rope_config.rope_to_hf(full_rope)
    if window_rope is not None and full_rope is not None and not _is_one_base(window_rope, full_rope):
        own |= {
            "rope_parameters": dict(
                zip(_LAYER_TYPES, map(rope_config.rope_parameters_to_hf, (window_rope, full_rope)), strict=True)
            )
        }
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | own


def _is_one_base(window_rope: Rope, full_rope: Rope) -> bool:
    """True if transformers 4 and 5 both read these two RoPEs from one base and one scaling."""
    return window_rope.scaling is None and window_rope.rope_theta == full_rope.rope_theta == _DEFAULT_THETA


def _types(values: Mapping[str, Any]) -> list[str]:
    """Return each layer's type: every fourth has full attention, unless the config lists the types."""
    if values["layer_types"] is not None:
        return read_layer_types(values)
    return [_LAYER_TYPES[(index + 1) % 4 == 0] for index in range(values["num_hidden_layers"])]


def _ropes(values: Mapping[str, Any], types: list[str]) -> dict[str, Rope]:
    """Return the RoPE of each layer type.

    The config has a table for each type, or one base and one scaling; layers with a window then have no scaling.
    """
    if values["rope_parameters"] is not None:
        ropes = rope_config.ropes_by_layer_type(
            "olmo3", {**values, "rope_theta": None, "rope_scaling": None}, _LAYER_TYPES, _DEFAULT_THETA
        )
        full = {**values, "rope_parameters": rope_config.rope_parameters_to_hf(ropes["full_attention"])}
        return ropes | {"full_attention": rope_config.rope_from_hf("olmo3", full)}
    values = rope_config.with_default_theta(values, _DEFAULT_THETA)
    full_rope = rope_config.rope_from_hf("olmo3", values)
    if full_rope.rope_theta != _DEFAULT_THETA and "sliding_attention" in types:
        raise ModelError(
            f"config.json: rope_theta={full_rope.rope_theta:g} of an olmo3 model is ambiguous: transformers 4 "
            f"uses it in sliding-window layers, and transformers 5 uses {_DEFAULT_THETA:g} there; "
            f"give rope_parameters, with a table for each of {' and '.join(_LAYER_TYPES)}"
        )
    return {"sliding_attention": Rope(full_rope.rope_theta), "full_attention": full_rope}
