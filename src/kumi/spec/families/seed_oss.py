"""Seed-OSS: Llama with biases on queries, keys and values, and a head_dim independent of hidden_size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared.config_keys import DECODER, Key, read
from kumi.spec.families._shared.decoder_config import (
    build_llama_like,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
)
from kumi.spec.model import ModelSpec

ARCHITECTURE = "SeedOssForCausalLM"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 524_288),
    "num_key_value_heads": Key("integer or null", 8),
    "head_dim": Key("integer or null", 128),
    "rms_norm_eps": Key("number", 1e-6),
    "attention_bias": Key("true or false", True),
    "attention_out_bias": Key("true or false", False),
    "mlp_bias": Key("true or false", False),
    "bos_token_id": Key("integer or null", 0),
    "eos_token_id": Key("integer or list of integers or null", 2),
    "pad_token_id": Key("integer or null", 1),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "seed_oss" describes."""
    values = read("seed_oss", config, KEYS)
    return build_llama_like(
        "seed_oss",
        values,
        windows=[None] * values["num_hidden_layers"],
        qkv_bias=values["attention_bias"],
        out_bias=values["attention_out_bias"],
        mlp_bias=values["mlp_bias"],
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    attention, mlp = first_grouped_attention(spec), first_dense_mlp(spec)
    return common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | {
        "attention_bias": attention.qkv_bias,
        "attention_out_bias": attention.out_bias,
        "mlp_bias": mlp.bias,
        "residual_dropout": 0.0,
    }
