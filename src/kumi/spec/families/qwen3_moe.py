"""Qwen3 with routed experts: Qwen3's attention, and experts in all layers or in every few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared import experts
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_LOSS, Key, fixed, neutral, read
from kumi.spec.families._shared.decoder_config import check_sizes, grouped, model, windowed
from kumi.spec.families._shared.sliding_windows import WINDOW_KEYS, from_values, to_values
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.weight_rules import EXPERTS

ARCHITECTURE = "Qwen3MoeForCausalLM"
FIXED = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
KEYS = {
    **DECODER,
    "rms_norm_eps": Key("number", 1e-6),
    "max_position_embeddings": Key("integer", 32_768),
    **ROUTER_LOSS,
    **WINDOW_KEYS,
    **experts.COUNT,
    "num_key_value_heads": Key("integer?", 4),
    "attention_bias": Key("true or false", False),
    "moe_intermediate_size": Key("integer", 768),
    "num_experts_per_tok": Key("integer", 8),
    "norm_topk_prob": Key("true or false", False),
    **experts.SPARSE,
    # What Qwen3-Coder says besides, and what no other value of is computed.
    **fixed(FIXED),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "qwen3_moe" describes."""
    values = read("qwen3_moe", config, KEYS)
    check_sizes(values)
    neutral("qwen3_moe", values, **FIXED)
    moe = MoE(
        experts.count("qwen3_moe", values),
        values["num_experts_per_tok"],
        values["moe_intermediate_size"],
        norm_topk_prob=values["norm_topk_prob"],
        router_aux_loss_coef=experts.aux_loss_coef("qwen3_moe", values, "router_aux_loss_coef", 0.001),
    )
    bias = values["attention_bias"]
    layers = windowed(
        "qwen3_moe", values, from_values(values), experts.check_experts(moe), qkv_bias=bias, out_bias=bias, qk_norm=True
    )
    return model("qwen3_moe", values, experts.in_some_layers(values, layers), weights=EXPERTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`."""
    return experts.to_hf(spec, ARCHITECTURE) | {"attention_bias": grouped(spec).qkv_bias} | to_values(spec)
