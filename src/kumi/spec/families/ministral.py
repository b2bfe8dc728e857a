"""Ministral: Mistral with sliding windows in some layers, as listed in layer_types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families import mistral
from kumi.spec.families._shared import sliding_windows
from kumi.spec.families._shared.config_keys import read
from kumi.spec.families._shared.decoder_config import build_llama_like, common_to_hf, first_dense_mlp, read_layer_types
from kumi.spec.model import ModelSpec

ARCHITECTURE = "MinistralForCausalLM"
KEYS = mistral.KEYS


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "ministral" describes."""
    values = read("ministral", config, KEYS)
    return build_llama_like("ministral", values, windows=_windows(values))


def _windows(values: Mapping[str, Any]) -> list[int | None]:
    """Return each layer's window; without `layer_types`, all layers have `sliding_window`."""
    window = values["sliding_window"]
    if values["layer_types"] is None:
        return [window] * values["num_hidden_layers"]
    slides = [kind == "sliding_attention" for kind in read_layer_types(values)]
    if window is None and any(slides):
        raise ModelError(
            "config.json: layer_types of a ministral model has sliding_attention, but sliding_window is "
            "null; give a window, or make every layer full_attention"
        )
    return [window if slide else None for slide in slides]


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | {
        "sliding_window": sliding_windows.first_window(spec),
        "layer_types": sliding_windows.layer_types(spec),
    }
