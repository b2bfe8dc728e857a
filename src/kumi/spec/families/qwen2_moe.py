"""Qwen1.5 and Qwen2 with routed experts, and a shared expert scaled by a gate per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import experts
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_KEYS, Key, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    first_grouped_attention,
    layers_with_windows,
    read_layer_types,
)
from kumi.spec.families._shared.sliding_windows import WINDOW_KEYS
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.weight_rules import EXPERTS, Rename, Weights

ARCHITECTURE = "Qwen2MoeForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 32_768),
    **ROUTER_KEYS,
    **WINDOW_KEYS,
    **experts.NUM_EXPERTS_KEYS,
    **experts.SPARSE_LAYER_KEYS,
    "num_key_value_heads": Key("integer or null", 16),
    "qkv_bias": Key("true or false", True),
    "rms_norm_eps": Key("number", 1e-6),
    "moe_intermediate_size": Key("integer", 1408),
    "shared_expert_intermediate_size": Key("integer", 5632),
    "num_experts_per_tok": Key("integer", 4),
    "norm_topk_prob": Key("true or false", False),
}
# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights((Rename("mlp.shared_experts", "mlp.shared_expert"), *EXPERTS.rules))


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "qwen2_moe" describes."""
    values = _without_windows(read("qwen2_moe", config, KEYS))
    check_sizes(values)
    moe = MoE(
        num_experts=experts.num_experts("qwen2_moe", values),
        num_experts_per_tok=values["num_experts_per_tok"],
        moe_intermediate_size=values["moe_intermediate_size"],
        shared_intermediate_size=values["shared_expert_intermediate_size"],
        shared_gate=True,
        norm_topk_prob=values["norm_topk_prob"],
        router_aux_loss_coef=experts.aux_loss_coef("qwen2_moe", values, "router_aux_loss_coef", 0.001),
    )
    layers = layers_with_windows(
        "qwen2_moe", values, [None] * values["num_hidden_layers"], experts.checked_moe(moe), qkv_bias=values["qkv_bias"]
    )
    return build_model("qwen2_moe", values, experts.with_dense_layers(values, layers), weights=WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    return experts.experts_to_hf(spec, ARCHITECTURE) | {
        "shared_expert_intermediate_size": experts.first_moe(spec).shared_intermediate_size,
        "qkv_bias": first_grouped_attention(spec).qkv_bias,
        "use_sliding_window": False,
    }


def _without_windows(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` without windows; raise ModelError if they have windows.

    Versions of transformers disagree about which layers have a window.
    """
    require_values("qwen2_moe", values, use_sliding_window=False)
    if values["layer_types"] is not None and "sliding_attention" in read_layer_types(values):
        raise ModelError(
            "config.json: layer_types of a qwen2_moe model has sliding_attention, but "
            "use_sliding_window=False; make every layer full_attention"
        )
    return {**values, "sliding_window": None}
