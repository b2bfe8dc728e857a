"""Which layers of a Qwen model see only a sliding window.

Newer configs list the kind of every layer in `layer_types`; in older ones the layers from `max_window_layers` on slide.
Neither counts unless `use_sliding_window` is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import Key
from kumi.spec.families._shared.decoder_config import check_layer_types
from kumi.spec.model import ModelSpec

WINDOW_KEYS = {
    "use_sliding_window": Key("true or false", False),
    "sliding_window": Key("integer?", 4096),
    "max_window_layers": Key("integer", 28),
    "layer_types": Key("list?", None),
}


def from_values(values: Mapping[str, Any]) -> list[int | None]:
    """Each layer's sliding window, or None where the layer sees everything before."""
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if values["layer_types"] is not None:
        slides = [kind == "sliding_attention" for kind in check_layer_types(values)]
        if window is None and any(slides):
            raise ModelError(
                f"config.json: layer_types has sliding_attention, but use_sliding_window="
                f"{values['use_sliding_window']} and sliding_window={values['sliding_window']}; "
                f"set both, or make every layer full_attention"
            )
    else:
        slides = [index >= values["max_window_layers"] for index in range(values["num_hidden_layers"])]
    return [window if slide else None for slide in slides]


def to_values(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys that say which layers of `spec` slide.

    Versions of transformers before `layer_types` can only let the last layers slide, and then read the same from
    `max_window_layers`. Where windows come in another order that key is left out: nothing in it would be true, and only
    readers of `layer_types` are meant.
    """
    windows = [layer.window for layer in spec.layers]
    slides = [window is not None for window in windows]
    first = slides.index(True) if any(slides) else len(slides)
    return {
        "use_sliding_window": any(slides),
        "sliding_window": width(spec),
        **({"max_window_layers": first} if all(slides[first:]) else {}),
        "layer_types": kinds(spec),
    }


def kinds(spec: ModelSpec) -> list[str]:
    """The word of `layer_types` for every layer."""
    return ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers]


def width(spec: ModelSpec) -> int | None:
    """The window of the first layer that has one; None where all see everything before."""
    return next((layer.window for layer in spec.layers if layer.window is not None), None)
