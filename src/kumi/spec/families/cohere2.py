"""Cohere's Command R7B and A: attention and MLP in parallel after one LayerNorm; RoPE only in sliding-window layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config, sliding_windows
from kumi.spec.families._shared.config_keys import DECODER, Key, fixed_keys, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    grouped_attention,
    read_layer_types,
)
from kumi.spec.model import MLP, LayerSpec, ModelSpec

ARCHITECTURE = "Cohere2ForCausalLM"
# Keys of published configs with one supported value.
_FIXED = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
    "order_of_interleaved_layers": "local_attn_first",
}
KEYS = {
    **{name: key for name, key in DECODER.items() if name != "rms_norm_eps"},
    **fixed_keys(_FIXED),
    "max_position_embeddings": Key("integer", 8_192),
    "num_key_value_heads": Key("integer or null", None),
    "layer_norm_eps": Key("number", 1e-5),
    "logit_scale": Key("number", 0.0625),
    "attention_bias": Key("true or false", False),
    "sliding_window": Key("integer", 4096),
    "sliding_window_pattern": Key("integer", 4),
    "layer_switch": Key("integer or null", None),
    "layer_types": Key("list or null", None),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer or null", 5),
    "eos_token_id": Key("integer or list of integers or null", 255001),
    "pad_token_id": Key("integer or null", 0),
    "cache_implementation": Key("text or null", None),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "cohere2" describes."""
    values = read("cohere2", config, KEYS)
    check_sizes(values)
    require_values("cohere2", values, **_FIXED)
    bias, rope = values["attention_bias"], replace(rope_config.rope_from_hf("cohere2", values), interleave=True)
    attention = grouped_attention(values, rope, qkv_bias=bias, out_bias=bias, sliding_window=values["sliding_window"])
    mlp = MLP(values["intermediate_size"])
    layer = {
        "sliding_attention": LayerSpec(attention, mlp, parallel=True, shared_norm=True),
        "full_attention": LayerSpec(
            replace(attention, rope=None, sliding_window=None), mlp, parallel=True, shared_norm=True
        ),
    }
    return build_model(
        "cohere2",
        values,
        [layer[kind] for kind in _types(values)],
        norm="layernorm",
        norm_bias=False,
        norm_eps=float(values["layer_norm_eps"]),
        logit_scale=float(values["logit_scale"]),
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    written = common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | {
        "layer_norm_eps": spec.norm_eps,
        "logit_scale": spec.logit_scale,
        "attention_bias": first_grouped_attention(spec).qkv_bias,
        "sliding_window": sliding_windows.first_window(spec) or 4096,
        "layer_types": sliding_windows.layer_types(spec),
    }
    return {name: value for name, value in written.items() if name != "rms_norm_eps"}


def _types(values: Mapping[str, Any]) -> list[str]:
    """Return each layer's type: as listed, or full attention in every `sliding_window_pattern`-th layer."""
    pattern, switch = values["sliding_window_pattern"], values["layer_switch"]
    if values["layer_types"] is not None:
        return read_layer_types(values)
    if pattern < 1 or switch not in (None, pattern):
        raise ModelError(
            f"config.json: sliding_window_pattern={pattern} and layer_switch={switch} of a cohere2 model "
            f"must be the same number above 0, the interval of layers with full attention; correct them"
        )
    return [
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(values["num_hidden_layers"])
    ]
