"""Qwen3 with routed experts: Qwen3's attention, and experts in all layers or in every n-th layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared import experts
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_KEYS, Key, fixed_keys, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    first_grouped_attention,
    layers_with_windows,
)
from kumi.spec.families._shared.sliding_windows import WINDOW_KEYS, window_keys, windows_from_values
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.weight_rules import EXPERTS

ARCHITECTURE = "Qwen3MoeForCausalLM"
_FIXED = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
KEYS = {
    **DECODER,
    "rms_norm_eps": Key("number", 1e-6),
    "max_position_embeddings": Key("integer", 32_768),
    **ROUTER_KEYS,
    **WINDOW_KEYS,
    **experts.NUM_EXPERTS_KEYS,
    "num_key_value_heads": Key("integer or null", 4),
    "attention_bias": Key("true or false", False),
    "moe_intermediate_size": Key("integer", 768),
    "num_experts_per_tok": Key("integer", 8),
    "norm_topk_prob": Key("true or false", False),
    **experts.SPARSE_LAYER_KEYS,
    # Keys of Qwen3-Coder with one supported value.
    **fixed_keys(_FIXED),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "qwen3_moe" describes."""
    values = read("qwen3_moe", config, KEYS)
    check_sizes(values)
    require_values("qwen3_moe", values, **_FIXED)
    moe = MoE(
        experts.num_experts("qwen3_moe", values),
        values["num_experts_per_tok"],
        values["moe_intermediate_size"],
        norm_topk_prob=values["norm_topk_prob"],
        router_aux_loss_coef=experts.aux_loss_coef("qwen3_moe", values, "router_aux_loss_coef", 0.001),
    )
    bias = values["attention_bias"]
    layers = layers_with_windows(
        "qwen3_moe",
        values,
        windows_from_values(values),
        experts.checked_moe(moe),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
    return build_model("qwen3_moe", values, experts.with_dense_layers(values, layers), weights=EXPERTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    return (
        experts.experts_to_hf(spec, ARCHITECTURE)
        | {"attention_bias": first_grouped_attention(spec).qkv_bias}
        | window_keys(spec)
    )
