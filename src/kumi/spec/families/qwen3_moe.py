"""Qwen3 with routed experts: Qwen3's attention, and experts in all layers or in every few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families import experts
from kumi.spec.families.common import check_sizes, grouped, model, windowed
from kumi.spec.families.common import to_hf as common_to_hf
from kumi.spec.families.keys import DECODER, ROUTER_LOSS, Key, read
from kumi.spec.families.windows import WINDOW_KEYS, from_values, to_values
from kumi.spec.model import MLP, ModelSpec, MoE
from kumi.spec.rules import EXPERTS

ARCHITECTURE = "Qwen3MoeForCausalLM"
KEYS = {
    **DECODER,
    **ROUTER_LOSS,
    **WINDOW_KEYS,
    **experts.COUNT,
    "num_key_value_heads": Key("integer?", 4),
    "attention_bias": Key("true or false", False),
    "moe_intermediate_size": Key("integer", 768),
    "num_experts_per_tok": Key("integer", 8),
    "norm_topk_prob": Key("true or false", False),
    "decoder_sparse_step": Key("integer", 1),
    "mlp_only_layers": Key("list?", None),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "qwen3_moe" describes."""
    values = read("qwen3_moe", config, KEYS)
    check_sizes(values)
    moe = MoE(experts.count("qwen3_moe", values), values["num_experts_per_tok"], values["moe_intermediate_size"],
              norm_topk_prob=values["norm_topk_prob"],
              router_aux_loss_coef=experts.aux_loss_coef("qwen3_moe", values, "router_aux_loss_coef", 0.001),
              )  # fmt: skip
    bias, dense = values["attention_bias"], MLP(values["intermediate_size"])
    layers = windowed("qwen3_moe", values, from_values(values), experts.check_experts(moe), qkv_bias=bias,
                      out_bias=bias, qk_norm=True)  # fmt: skip
    sparse = _sparse(values)
    return model("qwen3_moe", values, [layer if routed else replace(layer, mlp=dense)
                                       for layer, routed in zip(layers, sparse)], weights=EXPERTS)  # fmt: skip


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`, which lists its dense layers; without any, their width is that of an expert."""
    moe = experts.routed(spec)
    dense = {index: layer.mlp for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MLP)}
    width = next(iter(dense.values())).intermediate_size if dense else moe.moe_intermediate_size
    own = {
        "moe_intermediate_size": moe.moe_intermediate_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "norm_topk_prob": moe.norm_topk_prob,
        "router_aux_loss_coef": moe.router_aux_loss_coef,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(dense),
        "attention_bias": grouped(spec).qkv_bias,
    }
    return common_to_hf(spec, ARCHITECTURE, width) | own | to_values(spec)


def _sparse(values: Mapping[str, Any]) -> list[bool]:
    """For every layer whether it has experts: each `decoder_sparse_step`-th, but for those in `mlp_only_layers`."""
    count, step, dense = values["num_hidden_layers"], values["decoder_sparse_step"], values["mlp_only_layers"] or []
    if any(type(index) is not int or not 0 <= index < count for index in dense):
        raise ModelError(f"config.json: mlp_only_layers={dense!r} must be numbers of layers, 0 to {count - 1}")
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]
