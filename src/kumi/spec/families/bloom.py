"""BLOOM: ALiBi instead of position embeddings, and normalized token embeddings (arXiv:2211.05100)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import Key, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    first_grouped_attention,
    grouped_attention,
)
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.weight_rules import QKV, Groups, Rename, Weights

ARCHITECTURE = "BloomForCausalLM"
# Three sizes have two names each.
_SPELLINGS = (("hidden_size", "n_embed"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
KEYS = {
    **{name: Key("integer or null", None) for pair in _SPELLINGS for name in pair},
    "vocab_size": Key("integer"),
    "n_inner": Key("integer or null", None),
    "seq_length": Key("integer", 2048),
    "layer_norm_epsilon": Key("number", 1e-5),
    "initializer_range": Key("number", 0.02),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
    "pad_token_id": Key("integer or null", None),
    "unk_token_id": Key("integer or null", None),
    "apply_residual_connection_post_layernorm": Key("true or false", False),
    # Runtime options of the original trainer.
    "pretraining_tp": Key("integer", 1),
    "slow_but_exact": Key("true or false", False),
    "attention_softmax_in_fp32": Key("true or false", True),
    "bias_dropout_fusion": Key("true or false", True),
    "masked_softmax_fusion": Key("true or false", True),
    "offset_alibi": Key("integer", 100),
    "skip_bias_add": Key("true or false", True),
    "skip_bias_add_qkv": Key("true or false", False),
}

# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (
        Groups(QKV, "self_attention.query_key_value"),
        Rename("self_attn.o_proj", "self_attention.dense"),
        Rename("mlp.up_proj", "mlp.dense_h_to_4h"),
        Rename("mlp.down_proj", "mlp.dense_4h_to_h"),
    ),
    prefixes=(
        ("model.layers.", "transformer.h."),
        ("model.embed_tokens.", "transformer.word_embeddings."),
        ("model.embed_norm.", "transformer.word_embeddings_layernorm."),
        ("model.norm.", "transformer.ln_f."),
    ),
    base="transformer.",
)


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "bloom" describes."""
    values = _one_spelling(read("bloom", config, KEYS))
    check_sizes(values)
    require_values("bloom", values, apply_residual_connection_post_layernorm=False, n_inner=None)
    heads = {"num_key_value_heads": values["num_attention_heads"]}
    attention = grouped_attention(values | heads, None, qkv_bias=True, out_bias=True, alibi=True)
    mlp = MLP(4 * values["hidden_size"], True, "gelu_pytorch_tanh", gated=False)
    layers = [LayerSpec(attention, mlp)] * values["num_hidden_layers"]
    return build_model(
        "bloom",
        values,
        layers,
        norm="layernorm",
        embedding_norm=True,
        weights=WEIGHTS,
        norm_eps=float(values["layer_norm_epsilon"]),
        max_position_embeddings=values["seq_length"],
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    same = ("vocab_size", "hidden_size", "initializer_range", "tie_word_embeddings", "bos_token_id", "pad_token_id")
    return {name: getattr(spec, name) for name in same} | {
        "architectures": [ARCHITECTURE],
        "model_type": "bloom",
        "n_layer": spec.num_hidden_layers,
        "n_head": first_grouped_attention(spec).num_attention_heads,
        "seq_length": spec.max_position_embeddings,
        "layer_norm_epsilon": spec.norm_eps,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cache": True,
        "eos_token_id": list(spec.eos_token_id) if isinstance(spec.eos_token_id, tuple) else spec.eos_token_id,
    }


def _one_spelling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with each size under the first of its two names."""
    result = dict(values)
    for first, second in _SPELLINGS:
        sizes = {values[name] for name in (first, second) if values[name] is not None}
        if len(sizes) != 1:
            raise ModelError(
                f"config.json: {first}={values[first]} and {second}={values[second]} of a bloom model; give one of them"
            )
        result[first] = sizes.pop()
    return result
