"""The first Gemma (arXiv:2403.08295): Llama with zero-centered norms, scaled embeddings and a gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import DECODER, Key, checked_activation, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    layers_with_windows,
)
from kumi.spec.model import MLP, ModelSpec

ARCHITECTURE = "GemmaForCausalLM"
_BIDIRECTIONAL = "use_bidirectional_attention"
# The tanh approximation; the first configs call it "gelu".
_GELU_TANH = "gelu_pytorch_tanh"
KEYS = {
    **DECODER,
    "max_position_embeddings": Key("integer", 8_192),
    "num_key_value_heads": Key("integer or null", 16),
    "head_dim": Key("integer", 256),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("true or false", True),
    "attention_bias": Key("true or false", False),
    "bos_token_id": Key("integer or null", 2),
    "eos_token_id": Key("integer or list of integers or null", 1),
    "pad_token_id": Key("integer or null", 0),
    "hidden_act": Key("text", _GELU_TANH),
    "hidden_activation": Key("text or null", None),
    _BIDIRECTIONAL: Key("true or false or null", None),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "gemma" describes."""
    values = read("gemma", config, KEYS)
    check_sizes(values)
    require_values("gemma", {**values, _BIDIRECTIONAL: bool(values[_BIDIRECTIONAL])}, use_bidirectional_attention=False)
    bias, mlp = values["attention_bias"], MLP(values["intermediate_size"], hidden_act=_activation(values))
    layers = layers_with_windows(
        "gemma", values, [None] * values["num_hidden_layers"], mlp, qkv_bias=bias, out_bias=bias
    )
    return build_model("gemma", values, layers, zero_centered_norm=True, embedding_scale=values["hidden_size"] ** 0.5)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    mlp = first_dense_mlp(spec)
    return common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size) | {
        "hidden_activation": mlp.hidden_act,
        "attention_bias": first_grouped_attention(spec).qkv_bias,
    }


def _activation(values: Mapping[str, Any]) -> str:
    """Return the activation. Its two keys must agree, since versions of transformers differ in which one they read."""
    act = _GELU_TANH if values["hidden_act"] == "gelu" else values["hidden_act"]
    if values["hidden_activation"] not in (None, act):
        raise ModelError(
            f"config.json: hidden_act={values['hidden_act']!r} and hidden_activation="
            f"{values['hidden_activation']!r} of a gemma model differ, and versions of transformers read "
            f"either; set both to the same value"
        )
    return checked_activation("gemma", "hidden_act", act)
