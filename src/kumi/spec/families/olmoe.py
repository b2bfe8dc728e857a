"""OLMoE: experts in every layer, and queries and keys normalized over all heads at once (arXiv:2409.02060)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared import experts
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_KEYS, Key, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_grouped_attention,
    layers_with_windows,
)
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.weight_rules import EXPERTS

ARCHITECTURE = "OlmoeForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 4_096),
    **ROUTER_KEYS,
    **experts.NUM_EXPERTS_KEYS,
    "num_key_value_heads": Key("integer or null", None),
    "attention_bias": Key("true or false", False),
    "num_experts_per_tok": Key("integer", 8),
    "norm_topk_prob": Key("true or false", False),
    "clip_qkv": Key("number or null", None),
    "rms_norm_eps": Key("number", 1e-5),
    "eos_token_id": Key("integer or list of integers or null", 50279),
    "pad_token_id": Key("integer or null", 1),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "olmoe" describes."""
    values = read("olmoe", config, KEYS)
    check_sizes(values)
    require_values("olmoe", values, clip_qkv=None)
    moe = MoE(
        experts.num_experts("olmoe", values),
        values["num_experts_per_tok"],
        values["intermediate_size"],
        norm_topk_prob=values["norm_topk_prob"],
        router_aux_loss_coef=experts.aux_loss_coef("olmoe", values, "router_aux_loss_coef", 0.01),
    )
    bias, windows = values["attention_bias"], [None] * values["num_hidden_layers"]
    layers = layers_with_windows(
        "olmoe",
        values,
        windows,
        experts.checked_moe(moe),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        qk_norm_whole=True,
    )
    return build_model("olmoe", values, layers, weights=EXPERTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    moe = experts.first_moe(spec)
    own = {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "norm_topk_prob": moe.norm_topk_prob,
        "router_aux_loss_coef": moe.router_aux_loss_coef,
        "attention_bias": first_grouped_attention(spec).qkv_bias,
        "clip_qkv": None,
    }
    return common_to_hf(spec, ARCHITECTURE, moe.moe_intermediate_size) | own
