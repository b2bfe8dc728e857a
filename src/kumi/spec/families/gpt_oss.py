"""gpt-oss 20B and 120B: experts with biases, every other layer a sliding window, and attention sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config, sliding_windows
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_LOSS, Key, read
from kumi.spec.families._shared.decoder_config import check_layer_types, check_sizes, grouped, model, windowed
from kumi.spec.families._shared.decoder_config import to_hf as common_to_hf
from kumi.spec.families._shared.experts import COUNT, check_experts, count, routed
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.weight_rules import Pairs, Rename, Weights

ARCHITECTURE = "GptOssForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 131_072),
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
    "swiglu_limit": Key("number", 7.0),
    "swiglu_alpha": Key("number", 1.702),
}

WEIGHTS = Weights(
    (
        Rename("mlp.gate", "mlp.router"),
        Pairs("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        Pairs("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias"),
        Rename("mlp.experts.down_proj", "mlp.experts.down_proj", transposed=True),
    )
)


# What transformers assumes where a config says nothing, or null.
DEFAULT_THETA = 150_000.0
DEFAULT_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "gpt_oss" describes."""
    values = rope_config.with_base(read("gpt_oss", config, KEYS), DEFAULT_THETA)
    if not values["rope_scaling"] and not values["rope_parameters"]:
        values["rope_scaling"] = DEFAULT_SCALING
    check_sizes(values)
    for name in ("swiglu_limit", "swiglu_alpha"):
        if values[name] <= 0:
            raise ModelError(f"config.json: {name}={values[name]} of a gpt_oss model must be above 0; correct it")
    # Softmax over the chosen experts' scores is softmax over all of them, divided by its sum over the chosen. The
    # weight that configs give the auxiliary loss is not taken over: 0.9 would count for more than the loss itself.
    moe = MoE(
        count("gpt_oss", values),
        values["num_experts_per_tok"],
        values["intermediate_size"],
        bias=True,
        act_limit=float(values["swiglu_limit"]),
        act_alpha=float(values["swiglu_alpha"]),
    )
    bias = values["attention_bias"]
    layers = windowed("gpt_oss", values, _windows(values), check_experts(moe), qkv_bias=bias, out_bias=bias, sinks=True)
    return model("gpt_oss", values, layers, weights=WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`."""
    moe, turned = routed(spec), grouped(spec).rope
    plain = {"rope_scaling": {"rope_type": "default"}} if turned is not None and turned.scaling is None else {}
    return common_to_hf(spec, ARCHITECTURE, moe.moe_intermediate_size) | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "experts_per_token": moe.num_experts_per_tok,
        "attention_bias": grouped(spec).qkv_bias,
        "sliding_window": sliding_windows.width(spec) or 128,
        "layer_types": sliding_windows.kinds(spec),
        "swiglu_limit": moe.act_limit,
        "swiglu_alpha": moe.act_alpha,
        **plain,
    }


def _windows(values: Mapping[str, Any]) -> list[int | None]:
    """Each layer's window: every other one slides, the first included, unless `layer_types` says otherwise."""
    count = values["num_hidden_layers"]
    if values["layer_types"] is None:
        return [None if index % 2 else values["sliding_window"] for index in range(count)]
    return [values["sliding_window"] if kind == "sliding_attention" else None for kind in check_layer_types(values)]
