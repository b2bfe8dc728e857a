"""SmolLM3: Llama whose every fourth layer knows no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config, sliding_windows
from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import check_layer_types, check_sizes, dense, grouped, model, windowed
from kumi.spec.families._shared.decoder_config import to_hf as common_to_hf
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec

ARCHITECTURE = "SmolLM3ForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 32_768),
    "num_key_value_heads": Key("integer?", 4),
    "attention_bias": Key("true or false", False),
    "mlp_bias": Key("true or false", False),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer?", 128000),
    "eos_token_id": Key("integer or list of integers?", 128001),
    "pad_token_id": Key("integer?", 128004),
    # A 1 for every layer that turns queries and keys; older configs say after how many layers one does not.
    "no_rope_layers": Key("list?", None),
    "no_rope_layer_interval": Key("integer", 4),
    "use_sliding_window": Key("true or false", False),
    "sliding_window": Key("integer?", None),
    "layer_types": Key("list?", None),
    # Published beside the others; no program reads them.
    "max_window_layers": Key("integer?", None),
    "pretraining_tp": Key("integer?", None),
}
DEFAULT_THETA = 2_000_000.0


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "smollm3" describes."""
    values = rope_config.with_base(read("smollm3", config, KEYS), DEFAULT_THETA)
    check_sizes(values)
    turns, bias, mlp = _turns(values), values["attention_bias"], MLP(values["intermediate_size"], values["mlp_bias"])
    layers = windowed("smollm3", values, _windows(values, turns), mlp, qkv_bias=bias, out_bias=bias)
    return model(
        "smollm3",
        values,
        [layer if turn else _without_positions(layer) for layer, turn in zip(layers, turns, strict=True)],
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`."""
    window, mlp = sliding_windows.width(spec), dense(spec)
    return common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | {
        "attention_bias": grouped(spec).qkv_bias,
        "mlp_bias": mlp.bias,
        "no_rope_layers": [int(layer.attends is not None and layer.attends.rope is not None) for layer in spec.layers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": sliding_windows.kinds(spec),
    }


def _turns(values: Mapping[str, Any]) -> list[bool]:
    """For every layer whether its queries and keys are turned by their positions."""
    count, said, interval = values["num_hidden_layers"], values["no_rope_layers"], values["no_rope_layer_interval"]
    if said is None:
        if interval < 1:
            raise ModelError(f"config.json: no_rope_layer_interval={interval} must be 1 or more")
        return [bool((index + 1) % interval) for index in range(count)]
    if len(said) != count or any(one not in (0, 1) for one in said):
        raise ModelError(
            f"config.json: no_rope_layers={said!r} must have a 0 (no positions) or 1 for each of the {count} layers"
        )
    return [bool(one) for one in said]


def _without_positions(layer: LayerSpec) -> LayerSpec:
    """`layer`, its queries and keys as they are."""
    assert isinstance(layer.attention, Attention)
    return replace(layer, attention=replace(layer.attention, rope=None))


def _windows(values: Mapping[str, Any], turns: list[bool]) -> list[int | None]:
    """Each layer's window; without a list, those slide that know no positions."""
    window = values["sliding_window"] if values["use_sliding_window"] else None
    if values["layer_types"] is None:
        return [None if turn else window for turn in turns]
    slides = [kind == "sliding_attention" for kind in check_layer_types(values)]
    if window is None and any(slides):
        raise ModelError(
            f"config.json: layer_types of a smollm3 model has sliding_attention, but use_sliding_window="
            f"{values['use_sliding_window']} and sliding_window={values['sliding_window']}; set both, or "
            f"make every layer full_attention"
        )
    return [window if slide else None for slide in slides]
