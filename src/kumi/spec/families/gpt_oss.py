"""gpt-oss 20B and 120B: experts with biases, a sliding window in every other layer, and attention sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config, sliding_windows
from kumi.spec.families._shared.config_keys import DECODER, ROUTER_KEYS, Key, read
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_grouped_attention,
    layers_with_windows,
    read_layer_types,
)
from kumi.spec.families._shared.experts import NUM_EXPERTS_KEYS, checked_moe, first_moe, num_experts
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.weight_rules import Pairs, Rename, Weights

ARCHITECTURE = "GptOssForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 131_072),
    **ROUTER_KEYS,
    **NUM_EXPERTS_KEYS,
    "num_key_value_heads": Key("integer or null", 8),
    "head_dim": Key("integer or null", 64),
    "attention_bias": Key("true or false", True),
    "sliding_window": Key("integer", 128),
    "layer_types": Key("list or null", None),
    "num_experts_per_tok": Key("integer", 4),
    "experts_per_token": Key("integer or null", None),
    "initial_context_length": Key("integer or null", None),
    "rms_norm_eps": Key("number", 1e-5),
    "swiglu_limit": Key("number", 7.0),
    "swiglu_alpha": Key("number", 1.702),
}

# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (
        Rename("mlp.gate", "mlp.router"),
        Pairs("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
        Pairs("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias"),
        Rename("mlp.experts.down_proj", "mlp.experts.down_proj", transposed=True),
    )
)


# Defaults of transformers for absent or null keys.
_DEFAULT_THETA = 150_000.0
_DEFAULT_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "gpt_oss" describes."""
    values = rope_config.with_default_theta(read("gpt_oss", config, KEYS), _DEFAULT_THETA)
    if not values["rope_scaling"] and not values["rope_parameters"]:
        values["rope_scaling"] = _DEFAULT_SCALING
    check_sizes(values)
    for name in ("swiglu_limit", "swiglu_alpha"):
        if values[name] <= 0:
            raise ModelError(f"config.json: {name}={values[name]} of a gpt_oss model must be above 0; correct it")
    # Softmax over the selected experts' scores equals softmax over all scores, normalized over the selected. The
    # configs' weight of the auxiliary loss, 0.9, is ignored: it would outweigh the language-model loss.
    moe = MoE(
        num_experts("gpt_oss", values),
        values["num_experts_per_tok"],
        values["intermediate_size"],
        bias=True,
        act_limit=float(values["swiglu_limit"]),
        act_alpha=float(values["swiglu_alpha"]),
    )
    bias = values["attention_bias"]
    layers = layers_with_windows(
        "gpt_oss", values, _windows(values), checked_moe(moe), qkv_bias=bias, out_bias=bias, sinks=True
    )
    return build_model("gpt_oss", values, layers, weights=WEIGHTS)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    moe, rope = first_moe(spec), first_grouped_attention(spec).rope
    plain = {"rope_scaling": {"rope_type": "default"}} if rope is not None and rope.scaling is None else {}
    return common_to_hf(spec, ARCHITECTURE, moe.moe_intermediate_size) | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_tok,
        "experts_per_token": moe.num_experts_per_tok,
        "attention_bias": first_grouped_attention(spec).qkv_bias,
        "sliding_window": sliding_windows.first_window(spec) or 128,
        "layer_types": sliding_windows.layer_types(spec),
        "swiglu_limit": moe.act_limit,
        "swiglu_alpha": moe.act_alpha,
        **plain,
    }


def _windows(values: Mapping[str, Any]) -> list[int | None]:
    """Return each layer's window. Without `layer_types`, the first, third, fifth, ... layers have a window."""
    count = values["num_hidden_layers"]
    if values["layer_types"] is None:
        return [None if index % 2 else values["sliding_window"] for index in range(count)]
    return [values["sliding_window"] if kind == "sliding_attention" else None for kind in read_layer_types(values)]
