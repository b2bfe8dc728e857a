"""Qwen3 with routed experts: Qwen3's attention, and experts in all layers or in every few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families import experts
from kumi.spec.families.common import check_sizes, model, windowed
from kumi.spec.families.keys import DECODER, ROUTER_LOSS, Key, read
from kumi.spec.families.windows import WINDOW_KEYS, from_values
from kumi.spec.model import MLP, ModelSpec, MoE

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
              norm_topk_prob=values["norm_topk_prob"])  # fmt: skip
    bias, dense = values["attention_bias"], MLP(values["intermediate_size"])
    layers = windowed("qwen3_moe", values, from_values(values), experts.check_experts(moe), qkv_bias=bias,
                      out_bias=bias, qk_norm=True)  # fmt: skip
    sparse = _sparse(values)
    return model("qwen3_moe", values, [layer if routed else replace(layer, mlp=dense)
                                       for layer, routed in zip(layers, sparse)])  # fmt: skip


def _sparse(values: Mapping[str, Any]) -> list[bool]:
    """For every layer whether it has experts: each `decoder_sparse_step`-th, but for those in `mlp_only_layers`."""
    count, step, dense = values["num_hidden_layers"], values["decoder_sparse_step"], values["mlp_only_layers"] or []
    if any(type(index) is not int or not 0 <= index < count for index in dense):
        raise ModelError(f"config.json: mlp_only_layers={dense!r} must be numbers of layers, 0 to {count - 1}")
    return [index not in dense and (index + 1) % step == 0 for index in range(count)]
