"""OLMo 3: OLMo 2 with sliding windows in three layers of four; only the others' rotation is stretched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families import olmo2
from kumi.spec.families._shared import rope_config, sliding_windows
from kumi.spec.families._shared.config_keys import Key, read
from kumi.spec.families._shared.decoder_config import (
    check_layer_types,
    check_sizes,
    dense,
    grouped,
    grouped_attention,
    model,
)
from kumi.spec.families._shared.decoder_config import to_hf as common_to_hf
from kumi.spec.model import MLP, LayerSpec, ModelSpec, Rope

ARCHITECTURE = "Olmo3ForCausalLM"
KINDS = ("sliding_attention", "full_attention")
# What transformers 5 takes for layers with a window where a config has one base for all layers.
DEFAULT_THETA = 500_000.0
KEYS = {**olmo2.KEYS, "sliding_window": Key("integer", 4096), "layer_types": Key("list?", None)}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "olmo3" describes."""
    values = read("olmo3", config, KEYS)
    check_sizes(values)
    types, mlp, bias = _types(values), MLP(values["intermediate_size"]), values["attention_bias"]
    width = {"sliding_attention": values["sliding_window"], "full_attention": None}
    layer = {
        kind: LayerSpec(
            grouped_attention(
                values,
                turned,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=True,
                qk_norm_whole=True,
                sliding_window=width[kind],
            ),
            mlp,
            pre_norms=False,
            post_norms=True,
        )
        for kind, turned in _ropes(values, types).items()
    }
    return model("olmo3", values, [layer[kind] for kind in types], weights=olmo2.WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`: transformers 4 reads one base and scaling, transformers 5 two tables."""
    ropes = {layer.window is not None: layer.attends.rope for layer in spec.layers if layer.attends is not None}
    own = {
        "attention_bias": grouped(spec).qkv_bias,
        "sliding_window": sliding_windows.width(spec) or 4096,
        "layer_types": sliding_windows.kinds(spec),
    }
    local, whole = ropes.get(True), ropes.get(False)
    turned = whole or local
    if turned is not None:
        own |= rope_config.to_hf(turned)
    if local is not None and turned is not None and not _as_one_base(local, turned):
        own |= {"rope_parameters": dict(zip(KINDS, map(rope_config.table_to_hf, (local, turned)), strict=True))}
    return common_to_hf(spec, ARCHITECTURE, dense(spec).intermediate_size) | own


def _as_one_base(local: Rope, whole: Rope) -> bool:
    """Whether all versions read the two rotations from one base and one scaling."""
    return local.scaling is None and local.rope_theta == whole.rope_theta == DEFAULT_THETA


def _types(values: Mapping[str, Any]) -> list[str]:
    """Return each layer's kind: every fourth sees everything, unless the config lists them."""
    if values["layer_types"] is not None:
        return check_layer_types(values)
    return [KINDS[(index + 1) % 4 == 0] for index in range(values["num_hidden_layers"])]


def _ropes(values: Mapping[str, Any], types: list[str]) -> dict[str, Rope]:
    """Return the rotation of each kind of layer, from a table each or from one base, whose scaling is that of layers
    without a window."""
    if values["rope_parameters"] is not None:
        ropes = rope_config.by_kind("olmo3", {**values, "rope_theta": None, "rope_scaling": None}, KINDS, DEFAULT_THETA)
        said = {**values, "rope_parameters": rope_config.table_to_hf(ropes["full_attention"])}
        return ropes | {"full_attention": rope_config.from_hf("olmo3", said)}
    values = rope_config.with_base(values, DEFAULT_THETA)
    whole = rope_config.from_hf("olmo3", values)
    if whole.rope_theta != DEFAULT_THETA and "sliding_attention" in types:
        raise ModelError(
            f"config.json: rope_theta={whole.rope_theta:g} of an olmo3 model is that of layers with a "
            f"window in transformers 4, and {DEFAULT_THETA:g} in transformers 5; give rope_parameters, "
            f"with a table for each of {' and '.join(KINDS)}"
        )
    return {"sliding_attention": Rope(whole.rope_theta), "full_attention": whole}
