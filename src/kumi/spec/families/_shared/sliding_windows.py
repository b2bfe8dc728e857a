"""Sliding windows in a config.json: the keys of Qwen models, and `layer_types`, which several families have.

Newer configs of Qwen list the type of every layer in `layer_types`. In older configs, the layer with the index
`max_window_layers` and all later layers have a window. Both apply only if `use_sliding_window` is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import Key
from kumi.spec.families._shared.decoder_config import read_layer_types
from kumi.spec.model import ModelSpec

WINDOW_KEYS = {
    "use_sliding_window": Key("true or false", False),
    "sliding_window": Key("integer or null", 4096),
    "max_window_layers": Key("integer", 28),
    "layer_types": Key("list or null", None),
}


def windows_from_values(values: Mapping[str, Any]) -> list[int | None]:
    """Return each layer's sliding window; None for full attention."""
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if values["layer_types"] is not None:
        slides = [kind == "sliding_attention" for kind in read_layer_types(values)]
        if window is None and any(slides):
            raise ModelError(
                f"config.json: layer_types has sliding_attention, but use_sliding_window="
                f"{values['use_sliding_window']} and sliding_window={values['sliding_window']}; "
                f"set both, or make every layer full_attention"
            )
    else:
        slides = [index >= values["max_window_layers"] for index in range(values["num_hidden_layers"])]
    return [window if slide else None for slide in slides]


def window_keys(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys for the sliding windows of `spec`.

    Versions of transformers before `layer_types` read `max_window_layers`: only the last layers can have a window. For
    other patterns that key is left out, since no value of it is right.
    """
    windows = [layer.window for layer in spec.layers]
    slides = [window is not None for window in windows]
    first = slides.index(True) if any(slides) else len(slides)
    return {
        "use_sliding_window": any(slides),
        "sliding_window": first_window(spec),
        **({"max_window_layers": first} if all(slides[first:]) else {}),
        "layer_types": layer_types(spec),
    }


def layer_types(spec: ModelSpec) -> list[str]:
    """Return the `layer_types` of a config.json."""
    return ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers]


def first_window(spec: ModelSpec) -> int | None:
    """Return the window of the first layer that has one; None if all layers have full attention."""
    return next((layer.window for layer in spec.layers if layer.window is not None), None)
