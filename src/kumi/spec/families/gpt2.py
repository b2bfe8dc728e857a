"""GPT-2, and the GPT-3 models, which have the same architecture: learned positions, layer norms, biases, GELU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.spec.families._shared.config_keys import Key, checked_activation, read, require_values
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    first_dense_mlp,
    first_grouped_attention,
    grouped_attention,
)
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec
from kumi.spec.weight_rules import QKV, Rename, Rows, Weights

ARCHITECTURE = "GPT2LMHeadModel"
KEYS = {
    "vocab_size": Key("integer"),
    "n_embd": Key("integer"),
    "n_layer": Key("integer"),
    "n_head": Key("integer"),
    "n_inner": Key("integer or null", None),
    "n_positions": Key("integer", 1024),
    "n_ctx": Key("integer or null", None),
    "activation_function": Key("text", "gelu_new"),
    "layer_norm_epsilon": Key("number", 1e-5),
    "initializer_range": Key("number", 0.02),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer or null", 50256),
    "eos_token_id": Key("integer or list of integers or null", 50256),
    "pad_token_id": Key("integer or null", None),
    "scale_attn_weights": Key("true or false", True),
    "scale_attn_by_inverse_layer_idx": Key("true or false", False),
    "reorder_and_upcast_attn": Key("true or false", False),
    # Keys of classification heads.
    "summary_type": Key("text", ""),
    "summary_use_proj": Key("true or false", True),
    "summary_activation": Key("text or null", None),
    "summary_proj_to_labels": Key("true or false", True),
}

# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (
        Rows(QKV, "attn.c_attn", transposed=True),
        Rename("self_attn.o_proj", "attn.c_proj", transposed=True),
        Rename("mlp.up_proj", "mlp.c_fc", transposed=True),
        Rename("mlp.down_proj", "mlp.c_proj", transposed=True),
        Rename("input_layernorm", "ln_1"),
        Rename("post_attention_layernorm", "ln_2"),
    ),
    prefixes=(
        ("model.layers.", "transformer.h."),
        ("model.embed_tokens.", "transformer.wte."),
        ("model.embed_positions.", "transformer.wpe."),
        ("model.norm.", "transformer.ln_f."),
    ),
    base="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "gpt2" describes."""
    values = read("gpt2", config, KEYS)
    check_sizes(values)
    require_values("gpt2", values, reorder_and_upcast_attn=False)
    hidden, heads = values["n_embd"], values["n_head"]
    same = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    attention = grouped_attention(
        same, None, qkv_bias=True, out_bias=True, **({} if values["scale_attn_weights"] else {"score_scale": 1.0})
    )
    act = checked_activation("gpt2", "activation_function", values["activation_function"])
    layer = LayerSpec(attention, MLP(values["n_inner"] or 4 * hidden, True, act, gated=False))
    layers = [
        _with_scaled_scores(layer, index + 1) if values["scale_attn_by_inverse_layer_idx"] else layer
        for index in range(values["n_layer"])
    ]
    return build_model(
        "gpt2",
        values | same,
        layers,
        norm="layernorm",
        weights=WEIGHTS,
        norm_eps=float(values["layer_norm_epsilon"]),
        max_position_embeddings=values["n_positions"],
        learned_positions=values["n_positions"],
    )


def _with_scaled_scores(layer: LayerSpec, number: int) -> LayerSpec:
    """Return `layer` with attention scores divided by `number`, the index of the layer counted from 1."""
    assert isinstance(layer.attention, Attention)
    if number == 1:
        return layer
    scale = layer.attention.head_dim**-0.5 if layer.attention.score_scale is None else layer.attention.score_scale
    return replace(layer, attention=replace(layer.attention, score_scale=scale / number))


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    attention, mlp = first_grouped_attention(spec), first_dense_mlp(spec)
    scales = [layer.attention.score_scale for layer in spec.layers if isinstance(layer.attention, Attention)]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "gpt2",
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_hidden_layers,
        "n_head": attention.num_attention_heads,
        "n_inner": mlp.intermediate_size,
        "n_positions": spec.learned_positions,
        "activation_function": mlp.hidden_act,
        "layer_norm_epsilon": spec.norm_eps,
        "initializer_range": spec.initializer_range,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "scale_attn_weights": scales[0] != 1.0,
        "scale_attn_by_inverse_layer_idx": len(set(scales)) > 1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": True,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_id) if isinstance(spec.eos_token_id, tuple) else spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
    }
