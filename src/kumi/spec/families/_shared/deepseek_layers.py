"""Helpers of DeepSeek-V2 and V3: latent attention (MLA), a few dense layers, then routed and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import experts, rope_config
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_KEYS, Key, require_values
from kumi.spec.families._shared.decoder_config import build_model, check_sizes, common_to_hf
from kumi.spec.families._shared.experts import checked_moe
from kumi.spec.model import MLP, LatentAttention, LayerSpec, ModelSpec, MoE
from kumi.spec.weight_rules import EXPERTS

# The keys that both families have.
LATENT_KEYS = {
    **DECODER,
    **ROUTER_KEYS,
    "num_key_value_heads": Key("integer or null", None),
    "q_lora_rank": Key("integer or null", 1536),
    "kv_lora_rank": Key("integer", 512),
    "qk_nope_head_dim": Key("integer", 128),
    "qk_rope_head_dim": Key("integer", 64),
    "qk_head_dim": Key("integer or null", None),
    "v_head_dim": Key("integer", 128),
    "attention_bias": Key("true or false", False),
    "n_routed_experts": Key("integer"),
    "n_shared_experts": Key("integer or null", None),
    "num_experts_per_tok": Key("integer"),
    "moe_intermediate_size": Key("integer"),
    "first_k_dense_replace": Key("integer", 0),
    "moe_layer_freq": Key("integer", 1),
    "n_group": Key("integer or null", None),
    "topk_group": Key("integer or null", None),
    "norm_topk_prob": Key("true or false", False),
    "routed_scaling_factor": Key("number", 1.0),
    # The load-balancing loss, computed over each sequence.
    "aux_loss_alpha": Key("number or null", None),
    "seq_aux": Key("true or false", True),
    # Without effect on the computation.
    "ep_size": Key("integer", 1),
    "auto_map": Key("table or null", None),
}


def build_deepseek(family: str, values: Mapping[str, Any], *, scoring: str, interleave: bool = True) -> ModelSpec:
    """Return the ModelSpec of `values`; `scoring` is the router's scoring function."""
    check_sizes(values)
    require_values(family, values, moe_layer_freq=1, seq_aux=True)
    _check_counts(values)
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if kv_heads not in (heads, None):
        raise ModelError(
            f"config.json: num_key_value_heads={kv_heads} of a {family} model must be "
            f"num_attention_heads={heads}, because latent attention has keys for every head; correct it"
        )
    attention = LatentAttention(
        heads,
        values["q_lora_rank"],
        values["kv_lora_rank"],
        values["qk_nope_head_dim"],
        values["qk_rope_head_dim"],
        values["v_head_dim"],
        rope_config.rope_from_hf(family, values),
        values["attention_bias"],
        interleave,
        rope_config.mscale_all_dim(values),
    )
    dense = LayerSpec(attention, MLP(values["intermediate_size"]))
    routed = LayerSpec(attention, checked_moe(_experts(family, values, scoring)))
    first = values["first_k_dense_replace"]
    layers = [dense if index < first else routed for index in range(values["num_hidden_layers"])]
    return build_model(family, values, layers, weights=EXPERTS)


def _check_counts(values: Mapping[str, Any]) -> None:
    """Raise ModelError for a wrong number of shared experts, of dense layers or of rotated dimensions."""
    shared, first, layers = values["n_shared_experts"], values["first_k_dense_replace"], values["num_hidden_layers"]
    if (shared or 0) < 0:
        raise ModelError(f"config.json: n_shared_experts={shared} must not be negative; correct it")
    if not 0 <= first <= layers:
        raise ModelError(
            f"config.json: first_k_dense_replace={first} must be from 0 to num_hidden_layers={layers}; correct it"
        )
    if values["qk_rope_head_dim"] % 2:
        raise ModelError(
            f"config.json: qk_rope_head_dim={values['qk_rope_head_dim']} is odd, but RoPE rotates pairs of "
            f"dimensions; use an even size"
        )


def deepseek_to_hf(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """Return the config.json keys that both families write; without dense layers, intermediate_size is an expert's."""
    moe, attention = experts.first_moe(spec), spec.layers[0].attention
    if not isinstance(attention, LatentAttention):
        raise ModelError(f"a {spec.family} config.json cannot express {type(attention).__name__}; use LatentAttention")
    dense = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MLP)]
    written = common_to_hf(spec, architecture, dense[0].intermediate_size if dense else moe.moe_intermediate_size)
    if attention.mscale_all_dim:
        written["rope_scaling"] |= rope_config.mscales_to_hf(attention)
    same = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    routing = (
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_group",
        "topk_group",
        "norm_topk_prob",
        "routed_scaling_factor",
        "scoring_func",
        "topk_method",
    )
    return (
        written
        | {name: getattr(attention, name) for name in same}
        | {
            **{name: getattr(moe, name) for name in routing},
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.shared_intermediate_size // moe.moe_intermediate_size,
            "first_k_dense_replace": len(dense),
            "moe_layer_freq": 1,
            "attention_bias": attention.bias,
            "aux_loss_alpha": moe.router_aux_loss_coef,
            "seq_aux": True,
        }
    )


def _experts(family: str, values: Mapping[str, Any], scoring: str) -> MoE:
    """Return the experts that `values` describe; with topk_method "greedy", their groups have no effect."""
    width, grouped = values["moe_intermediate_size"], values["topk_method"] != "greedy"
    return MoE(
        num_experts=values["n_routed_experts"],
        num_experts_per_tok=values["num_experts_per_tok"],
        moe_intermediate_size=width,
        shared_intermediate_size=width * (values["n_shared_experts"] or 0),
        scoring_func=scoring,
        n_group=(values["n_group"] or 1) if grouped else 1,
        topk_group=(values["topk_group"] or 1) if grouped else 1,
        norm_topk_prob=values["norm_topk_prob"],
        routed_scaling_factor=float(values["routed_scaling_factor"]),
        topk_method=values["topk_method"],
        router_aux_loss_coef=experts.aux_loss_coef(family, values, "aux_loss_alpha", 0.0),
        seq_aux=True,
    )
