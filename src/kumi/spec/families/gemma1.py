"""Gemma, the first (arXiv:2403.08295): Llama with norms around 1, scaled embeddings and a gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import DECODER, Key, activation, neutral, read
from kumi.spec.families._shared.decoder_config import check_sizes, dense, grouped, model, windowed
from kumi.spec.families._shared.decoder_config import to_hf as common_to_hf
from kumi.spec.model import MLP, ModelSpec

ARCHITECTURE = "GemmaForCausalLM"
BOTH_WAYS = "use_bidirectional_attention"
# What the first configs called "gelu" and trained with: the approximation by tanh.
GELU = "gelu_pytorch_tanh"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 8_192),
    "num_key_value_heads": Key("integer?", 16),
    "head_dim": Key("integer", 256),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("true or false", True),
    "attention_bias": Key("true or false", False),
    "bos_token_id": Key("integer?", 2),
    "eos_token_id": Key("integer or list of integers?", 1),
    "pad_token_id": Key("integer?", 0),
    "hidden_act": Key("text", GELU),
    "hidden_activation": Key("text?", None),
    BOTH_WAYS: Key("true or false?", None),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "gemma" describes."""
    values = read("gemma", config, KEYS)
    check_sizes(values)
    neutral("gemma", {**values, BOTH_WAYS: bool(values[BOTH_WAYS])}, use_bidirectional_attention=False)
    bias, mlp = values["attention_bias"], MLP(values["intermediate_size"], hidden_act=_activation(values))
    layers = windowed("gemma", values, [None] * values["num_hidden_layers"], mlp, qkv_bias=bias, out_bias=bias)
    return model("gemma", values, layers, zero_centered_norm=True, embedding_scale=values["hidden_size"] ** 0.5)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    mlp = dense(spec)
    return common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | {
        "hidden_activation": mlp.hidden_act,
        "attention_bias": grouped(spec).qkv_bias,
    }


def _activation(values: Mapping[str, Any]) -> str:
    """Return the activation that transformers uses, whose versions read one key or the other."""
    act = GELU if values["hidden_act"] == "gelu" else values["hidden_act"]
    if values["hidden_activation"] not in (None, act):
        raise ModelError(
            f"config.json: hidden_act={values['hidden_act']!r} and hidden_activation="
            f"{values['hidden_activation']!r} of a gemma model differ, and versions of transformers read "
            f"one or the other; give the same for both"
        )
    return activation("gemma", "hidden_act", act)
