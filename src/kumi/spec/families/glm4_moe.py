"""GLM-4.5 and 4.6: RoPE on half of every head, dense layers, then routed and shared experts (arXiv:2508.06471).

Additional layers in the files, for multi-token prediction, are passthrough tensors: not trained, and copied from the
model's files into its exports. `Weights.passthrough` has one prefix of names for each of these layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import experts, rope_config
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_KEYS, Key, read
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_grouped_attention,
    grouped_attention,
    mtp_fields,
)
from kumi.spec.model import MLP, LayerSpec, ModelSpec, MoE
from kumi.spec.weight_rules import EXPERTS

ARCHITECTURE = "Glm4MoeForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 131_072),
    **ROUTER_KEYS,
    "num_key_value_heads": Key("integer", 8),
    "partial_rotary_factor": Key("number or null", None),
    "rms_norm_eps": Key("number", 1e-5),
    "attention_bias": Key("true or false", False),
    "use_qk_norm": Key("true or false", False),
    "moe_intermediate_size": Key("integer", 1408),
    "num_experts_per_tok": Key("integer", 8),
    "n_shared_experts": Key("integer", 1),
    "n_routed_experts": Key("integer", 128),
    "routed_scaling_factor": Key("number", 1.0),
    "n_group": Key("integer", 1),
    "topk_group": Key("integer", 1),
    "first_k_dense_replace": Key("integer", 1),
    "norm_topk_prob": Key("true or false", True),
    # The number of additional layers has two names: transformers 4 writes one, transformers 5 the other.
    "num_nextn_predict_layers": Key("integer or null", None),
    "num_mtp_layers": Key("integer or null", None),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "glm4_moe" describes."""
    values = read("glm4_moe", config, KEYS)
    check_sizes(values)
    count, first, extra = values["num_hidden_layers"], values["first_k_dense_replace"], _mtp_layers(values)
    if not 0 <= first <= count or values["n_shared_experts"] < 1:
        raise ModelError(
            f"config.json: first_k_dense_replace={first} must be 0 to num_hidden_layers={count}, and "
            f"n_shared_experts={values['n_shared_experts']} 1 or more; correct them"
        )
    rope = rope_config.partial_rope_from_hf("glm4_moe", values, values["partial_rotary_factor"], 0.5)
    attention = grouped_attention(values, rope, qkv_bias=values["attention_bias"], qk_norm=values["use_qk_norm"])
    dense = LayerSpec(attention, MLP(values["intermediate_size"]))
    routed = replace(dense, mlp=_experts(values))
    layers = [dense if index < first else routed for index in range(count)]
    return build_model("glm4_moe", values, layers, **mtp_fields(EXPERTS, count, extra))


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`; without dense layers, intermediate_size is that of an expert."""
    moe, attention = experts.first_moe(spec), first_grouped_attention(spec)
    dense = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MLP)]
    width = dense[0].intermediate_size if dense else moe.moe_intermediate_size
    same = (
        "moe_intermediate_size",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "norm_topk_prob",
    )
    return (
        common_to_hf(spec, ARCHITECTURE, width)
        | {name: getattr(moe, name) for name in same}
        | {
            "partial_rotary_factor": 1.0 if attention.rope is None else attention.rope.partial_rotary_factor,
            "attention_bias": attention.qkv_bias,
            "use_qk_norm": attention.qk_norm,
            "n_routed_experts": moe.num_experts,
            "n_shared_experts": moe.shared_intermediate_size // moe.moe_intermediate_size,
            "first_k_dense_replace": len(dense),
            "num_nextn_predict_layers": len(spec.weights.passthrough),
        }
    )


def _mtp_layers(values: Mapping[str, Any]) -> int:
    """Return the number of multi-token-prediction layers, which the config gives under one of two names."""
    old, new = values["num_nextn_predict_layers"], values["num_mtp_layers"]
    counts = {old, new} - {None}
    if len(counts) > 1 or min(counts, default=0) < 0:
        raise ModelError(
            f"config.json: num_nextn_predict_layers={old} and num_mtp_layers={new} of a glm4_moe model; "
            f"give one number, 0 or more"
        )
    return int(max(counts, default=0))


def _experts(values: Mapping[str, Any]) -> MoE:
    """Return the experts that `values` describe."""
    width = values["moe_intermediate_size"]
    return experts.checked_moe(
        MoE(
            num_experts=values["n_routed_experts"],
            num_experts_per_tok=values["num_experts_per_tok"],
            moe_intermediate_size=width,
            shared_intermediate_size=width * values["n_shared_experts"],
            scoring_func="sigmoid",
            n_group=values["n_group"],
            topk_group=values["topk_group"],
            norm_topk_prob=values["norm_topk_prob"],
            routed_scaling_factor=float(values["routed_scaling_factor"]),
            topk_method="noaux_tc",
        )
    )
