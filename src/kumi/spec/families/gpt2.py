"""GPT-2 and the GPT-3 models, which share its shape: learned positions, layer norms, biases, GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families.common import check_sizes, grouped_attention, model
from kumi.spec.families.keys import Key, activation, neutral, read
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.rules import QKV, Rename, Rows, Weights

ARCHITECTURE = "GPT2LMHeadModel"
KEYS = {
    "vocab_size": Key("integer"),
    "n_embd": Key("integer"),
    "n_layer": Key("integer"),
    "n_head": Key("integer"),
    "n_inner": Key("integer?", None),
    "n_positions": Key("integer", 1024),
    "n_ctx": Key("integer?", None),
    "activation_function": Key("text", "gelu_new"),
    "layer_norm_epsilon": Key("number", 1e-5),
    "initializer_range": Key("number", 0.02),
    "tie_word_embeddings": Key("true or false", True),
    "bos_token_id": Key("integer?", 50256),
    "eos_token_id": Key("integer or list of integers?", 50256),
    "pad_token_id": Key("integer?", None),
    "scale_attn_weights": Key("true or false", True),
    "scale_attn_by_inverse_layer_idx": Key("true or false", False),
    "reorder_and_upcast_attn": Key("true or false", False),
    # Whether a trainer drops anything is not the model's affair.
    "resid_pdrop": Key("number", 0.1),
    "embd_pdrop": Key("number", 0.1),
    "attn_pdrop": Key("number", 0.1),
    # Of models that classify.
    "summary_type": Key("text", ""),
    "summary_use_proj": Key("true or false", True),
    "summary_activation": Key("text?", None),
    "summary_proj_to_labels": Key("true or false", True),
    "summary_first_dropout": Key("number", 0.1),
}

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
        ("model.layers.", "transformer.h."), ("model.embed_tokens.", "transformer.wte."),
        ("model.embed_positions.", "transformer.wpe."), ("model.norm.", "transformer.ln_f."),
    ),
    base="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
)  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "gpt2" describes."""
    values = read("gpt2", config, KEYS)
    check_sizes(values)
    neutral("gpt2", values, reorder_and_upcast_attn=False)
    hidden, heads = values["n_embd"], values["n_head"]
    same = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": heads}
    attention = grouped_attention(same, None, qkv_bias=True, out_bias=True)
    act = activation("gpt2", "activation_function", values["activation_function"])
    layer = LayerSpec(attention, MLP(values["n_inner"] or 4 * hidden, True, act, gated=False))
    return model("gpt2", values | same, [layer] * values["n_layer"], norm="layernorm", weights=WEIGHTS,
                 norm_eps=float(values["layer_norm_epsilon"]), max_position_embeddings=values["n_positions"],
                 learned_positions=values["n_positions"])  # fmt: skip
