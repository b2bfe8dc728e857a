"""Phi-3 and Phi-4: Llama with one matrix for query, key and value and one for gate and up (arXiv:2404.14219)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config
from kumi.spec.families._shared.config_keys import DECODER, Key, fixed_keys, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    grouped_attention,
)
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec
from kumi.spec.weight_rules import QKV, Rows, Weights

ARCHITECTURE = "Phi3ForCausalLM"
_FIXED = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
KEYS = {
    **DECODER,
    "rms_norm_eps": Key("number", 1e-5),
    "max_position_embeddings": Key("integer", 4_096),
    "num_key_value_heads": Key("integer or null", None),
    "attention_bias": Key("true or false", False),
    "sliding_window": Key("integer or null", None),
    "original_max_position_embeddings": Key("integer", 4096),
    "partial_rotary_factor": Key("number or null", None),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 32000),
    "pad_token_id": Key("integer or null", 32000),
    "auto_map": Key("table or null", None),
    # Keys of Phi-4-mini with one supported value.
    **fixed_keys(_FIXED),
}

# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights((Rows(QKV, "self_attn.qkv_proj"), Rows(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj")))


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "phi3" describes.

    `attention_bias` has no effect, as in transformers.
    """
    values = read("phi3", config, KEYS)
    check_sizes(values)
    require_values("phi3", values, **_FIXED)
    values |= {key: _with_original(values[key], values) for key in ("rope_scaling", "rope_parameters")}
    rope = rope_config.partial_rope_from_hf("phi3", values, values["partial_rotary_factor"], 1.0)
    attention = grouped_attention(values, rope)
    _check_factors(attention)
    layer = LayerSpec(replace(attention, sliding_window=values["sliding_window"]), MLP(values["intermediate_size"]))
    return build_model("phi3", values, [layer] * values["num_hidden_layers"], weights=WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`. A LongRoPE table has only its type and factors, as transformers 4 demands."""
    attention = first_grouped_attention(spec)
    own: dict[str, Any] = {"sliding_window": attention.sliding_window, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    rope = attention.rope
    if rope is not None:
        own["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope is not None and rope.scaling == "longrope":
        table = rope_config.rope_to_hf(rope)["rope_scaling"]
        factors = {name: table[name] for name in ("short_factor", "long_factor")}
        own |= {
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "rope_scaling": {"type": "longrope", **factors},
        }
    return common_to_hf(spec, ARCHITECTURE, first_dense_mlp(spec).intermediate_size) | own


def _with_original(table: Mapping[str, Any] | None, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the RoPE table with the original context, which phi3 configs have outside of the table."""
    if table is None or rope_config.scaling_type("phi3", table) != "longrope":
        return None if table is None else dict(table)
    return {"original_max_position_embeddings": values["original_max_position_embeddings"], **table}


def _check_factors(attention: Attention) -> None:
    """Raise ModelError unless LongRoPE has one factor for each pair of rotated dimensions."""
    rope, pairs = attention.rope, attention.rotary_dim // 2
    if rope is None or rope.short_factor is None or rope.long_factor is None:
        return
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if len(factors) != pairs:
            raise ModelError(
                f"config.json: {name} of a phi3 model has {len(factors)} numbers for {pairs} pairs of rotated "
                f"dimensions; give one number per pair"
            )
