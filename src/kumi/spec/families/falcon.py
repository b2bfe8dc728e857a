"""Falcon 7B, 40B and 180B: attention and MLP in parallel, few key-value heads (arXiv:2311.16867)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config
from kumi.spec.families._shared.config_keys import Key, check_agrees, checked_activation, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    grouped_attention,
)
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.weight_rules import QKV, Groups, Rename, Rule, Weights

ARCHITECTURE = "FalconForCausalLM"
KEYS = {
    "vocab_size": Key("integer"),
    "hidden_size": Key("integer"),
    "num_hidden_layers": Key("integer"),
    "num_attention_heads": Key("integer"),
    "num_kv_heads": Key("integer or null", None),
    "ffn_hidden_size": Key("integer or null", None),
    "intermediate_size": Key("integer or null", None),
    "activation": Key("text", "gelu"),
    "multi_query": Key("true or false", True),
    "new_decoder_architecture": Key("true or false", False),
    "num_ln_in_parallel_attn": Key("integer or null", None),
    "parallel_attn": Key("true or false", True),
    "bias": Key("true or false", False),
    "alibi": Key("true or false", False),
    "max_position_embeddings": Key("integer", 2048),
    "rope_theta": Key("number or null", None),
    "rope_scaling": Key("table or null", None),
    "rope_parameters": Key("table or null", None),
    "layer_norm_epsilon": Key("number", 1e-5),
    "initializer_range": Key("number", 0.02),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer or null", 11),
    "eos_token_id": Key("integer or list of integers or null", 11),
    "pad_token_id": Key("integer or null", None),
    "apply_residual_connection_post_layernorm": Key("true or false", False),
    "auto_map": Key("table or null", None),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "falcon" describes."""
    values = read("falcon", config, KEYS)
    check_sizes(values)
    require_values("falcon", values, apply_residual_connection_post_layernorm=False)
    norms = _norms(values)
    rope = None if values["alibi"] else rope_config.rope_from_hf("falcon", values)
    heads = {"num_key_value_heads": _key_heads(values)}
    attention = grouped_attention(
        values | heads,
        rope,
        qkv_bias=values["bias"],
        out_bias=values["bias"],
        alibi=values["alibi"],
        alibi_stepped=values["alibi"],
    )
    act = checked_activation("falcon", "activation", values["activation"])
    width = values["ffn_hidden_size"] or 4 * values["hidden_size"]
    check_agrees("falcon", values, intermediate_size=width)
    mlp = MLP(width, values["bias"], act, gated=False)
    layer = LayerSpec(attention, mlp, parallel=values["parallel_attn"], shared_norm=norms == 1)
    return build_model(
        "falcon",
        values,
        [layer] * values["num_hidden_layers"],
        norm="layernorm",
        weights=_weights(norms),
        norm_eps=float(values["layer_norm_epsilon"]),
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`.

    It has the newer architecture if a parallel layer has groups of key-value heads or two norms.
    """
    attention, mlp, layer = first_grouped_attention(spec), first_dense_mlp(spec), spec.layers[0]
    heads, kv_heads = attention.num_attention_heads, attention.num_key_value_heads
    new = layer.parallel and (kv_heads not in (1, heads) or not layer.shared_norm)
    norms = {"num_ln_in_parallel_attn": 1 if layer.shared_norm else 2} if new else {}
    omitted = ("rms_norm_eps", "num_key_value_heads", "intermediate_size", "head_dim", "hidden_act")
    written = common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size)
    return (
        {name: value for name, value in written.items() if name not in omitted}
        | norms
        | {
            "num_kv_heads": kv_heads,
            "multi_query": kv_heads == 1,
            "new_decoder_architecture": new,
            "parallel_attn": layer.parallel,
            "ffn_hidden_size": mlp.intermediate_size,
            "activation": mlp.hidden_act,
            "bias": mlp.bias,
            "alibi": attention.alibi,
            "layer_norm_epsilon": spec.norm_eps,
            "hidden_dropout": 0.0,
        }
    )


def _weights(norms: int) -> Weights:
    """Return the format of the tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.

    `norms` is the number of norms before a parallel layer.
    """
    renamed_norms = (
        (Rename("input_layernorm", "ln_attn"), Rename("post_attention_layernorm", "ln_mlp")) if norms == 2 else ()
    )
    rules: tuple[Rule, ...] = (
        Groups(QKV, "self_attention.query_key_value"),
        Rename("self_attn.o_proj", "self_attention.dense"),
        Rename("mlp.up_proj", "mlp.dense_h_to_4h"),
        Rename("mlp.down_proj", "mlp.dense_4h_to_h"),
        *renamed_norms,
    )
    prefixes = (
        ("model.layers.", "transformer.h."),
        ("model.embed_tokens.", "transformer.word_embeddings."),
        ("model.norm.", "transformer.ln_f."),
    )
    return Weights(rules, prefixes, base="transformer.")


def _key_heads(values: Mapping[str, Any]) -> int:
    """Return the number of key-value heads: 1 with `multi_query` in the old architecture, else num_kv_heads.

    Without num_kv_heads, each query head has a key-value head of its own.
    """
    if values["multi_query"] and not values["new_decoder_architecture"]:
        return 1
    return int(values["num_kv_heads"] or values["num_attention_heads"])


def _norms(values: Mapping[str, Any]) -> int:
    """Return the number of norms before a parallel layer; 0 if attention and MLP are sequential."""
    new, norm_count = values["new_decoder_architecture"], values["num_ln_in_parallel_attn"]
    if not values["parallel_attn"]:
        if new:
            raise ModelError(
                "config.json: parallel_attn=False with new_decoder_architecture=True contradict each other; "
                "change one of them"
            )
        return 0
    norms = norm_count or (2 if new else 1)
    if norms not in ((1, 2) if new else (1,)):
        raise ModelError(
            f"config.json: num_ln_in_parallel_attn={norm_count} of a falcon model with "
            f"new_decoder_architecture={new} must be {'1 or 2' if new else '1'}; correct it"
        )
    return int(norms)
