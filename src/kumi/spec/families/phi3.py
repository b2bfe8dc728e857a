"""Phi-3 and Phi-4: Llama with one matrix for query, key and value and one for gate and up (arXiv:2404.14219)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.spec.families import rope
from kumi.spec.families.common import check_sizes, grouped_attention, model
from kumi.spec.families.keys import DECODER, Key, read
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.rules import QKV, Rows, Weights

ARCHITECTURE = "Phi3ForCausalLM"
KEYS = {
    **DECODER,
    "num_key_value_heads": Key("integer?", None),
    "attention_bias": Key("true or false", False),
    "sliding_window": Key("integer?", None),
    "original_max_position_embeddings": Key("integer", 4096),
    "partial_rotary_factor": Key("number?", None),
    "auto_map": Key("table?", None),
    # Whether a trainer drops anything is not the model's affair.
    "attention_dropout": Key("number", 0.0),
    "resid_pdrop": Key("number", 0.0),
    "embd_pdrop": Key("number", 0.0),
}

WEIGHTS = Weights(
    (Rows(QKV, "self_attn.qkv_proj"), Rows(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"))
)  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "phi3" describes; `attention_bias` is not read by its modules."""
    values = read("phi3", config, KEYS)
    check_sizes(values)
    embedding = rope.partial_from_hf("phi3", values, values["partial_rotary_factor"], 1.0)
    attention = grouped_attention(values, embedding)
    layer = LayerSpec(replace(attention, sliding_window=values["sliding_window"]),
                      MLP(values["intermediate_size"]))  # fmt: skip
    return model("phi3", values, [layer] * values["num_hidden_layers"], weights=WEIGHTS)
