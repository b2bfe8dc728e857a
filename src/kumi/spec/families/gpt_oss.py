"""gpt-oss 20B and 120B: experts with biases, every other layer a sliding window, and attention sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families.common import check_layer_types, check_sizes, model, windowed
from kumi.spec.families.experts import COUNT, check_experts, count
from kumi.spec.families.keys import DECODER, ROUTER_LOSS, Key, read
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.rules import Pairs, Rename, Weights

ARCHITECTURE = "GptOssForCausalLM"
KEYS = {
    **DECODER,
    **ROUTER_LOSS,
    **COUNT,
    "num_key_value_heads": Key("integer?", 8),
    "head_dim": Key("integer?", 64),
    "attention_bias": Key("true or false", True),
    "sliding_window": Key("integer", 128),
    "layer_types": Key("list?", None),
    "num_experts_per_tok": Key("integer", 4),
    "experts_per_token": Key("integer?", None),
    "initial_context_length": Key("integer?", None),
    "rms_norm_eps": Key("number", 1e-5),
    # Element-wise, and therefore without weight in a plan.
    "swiglu_limit": Key("number?", None),
    "swiglu_alpha": Key("number?", None),
    # How the published weights are stored.
    "quantization_config": Key("table?", None),
}

WEIGHTS = Weights((
    Rename("mlp.gate", "mlp.router"),
    Pairs("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
    Pairs("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias"),
    Rename("mlp.experts.down_proj", "mlp.experts.down_proj", transposed=True),
))  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "gpt_oss" describes."""
    values = read("gpt_oss", config, KEYS)
    check_sizes(values)
    moe = MoE(count("gpt_oss", values), values["num_experts_per_tok"], values["intermediate_size"], bias=True)
    bias = values["attention_bias"]
    layers = windowed("gpt_oss", values, _windows(values), check_experts(moe), qkv_bias=bias, out_bias=bias, sinks=True)
    return model("gpt_oss", values, layers, weights=WEIGHTS)


def _windows(values: Mapping[str, Any]) -> list[int | None]:
    """Each layer's window: every other one slides, the first included, unless `layer_types` says otherwise."""
    count = values["num_hidden_layers"]
    if values["layer_types"] is None:
        return [None if index % 2 else values["sliding_window"] for index in range(count)]
    return [values["sliding_window"] if kind == "sliding_attention" else None for kind in check_layer_types(values)]
