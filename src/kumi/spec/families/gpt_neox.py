"""GPT-NeoX-20B and Pythia: attention and MLP in parallel, and RoPE on a quarter of every head (arXiv:2204.06745)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families._shared import rope_config
from kumi.spec.families._shared.config_keys import DECODER, Key, check_agrees, checked_activation, read
from kumi.spec.families._shared.decoder_config import (
    build_model,
    check_sizes,
    common_to_hf,
    first_dense_mlp,
    first_grouped_attention,
    grouped_attention,
)
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.weight_rules import QKV, Groups, Rename, Weights

ARCHITECTURE = "GPTNeoXForCausalLM"
KEYS = {
    **{name: key for name, key in DECODER.items() if name not in ("rms_norm_eps", "head_dim", "rope_theta")},
    "max_position_embeddings": Key("integer", 2_048),
    "hidden_act": Key("text", "gelu"),
    "layer_norm_eps": Key("number", 1e-5),
    "bos_token_id": Key("integer or null", 0),
    "eos_token_id": Key("integer or list of integers or null", 2),
    "num_key_value_heads": Key("integer or null", None),
    "rotary_pct": Key("number or null", None),
    "rotary_emb_base": Key("number or null", None),
    "use_parallel_residual": Key("true or false", True),
    "attention_bias": Key("true or false", True),
}

# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (
        Groups(QKV, "attention.query_key_value"),
        Rename("self_attn.o_proj", "attention.dense"),
        Rename("mlp.up_proj", "mlp.dense_h_to_4h"),
        Rename("mlp.down_proj", "mlp.dense_4h_to_h"),
    ),
    prefixes=(
        ("model.layers.", "gpt_neox.layers."),
        ("model.embed_tokens.", "gpt_neox.embed_in."),
        ("model.norm.", "gpt_neox.final_layer_norm."),
        ("lm_head.", "embed_out."),
    ),
    base="gpt_neox.",
    ignored=(".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
)


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "gpt_neox" describes."""
    values = read("gpt_neox", config, KEYS)
    check_sizes(values)
    check_agrees("gpt_neox", values, num_key_value_heads=values["num_attention_heads"])
    heads = {"num_key_value_heads": values["num_attention_heads"], "rope_theta": values["rotary_emb_base"]}
    rope = rope_config.partial_rope_from_hf("gpt_neox", values | heads, values["rotary_pct"], 0.25)
    bias = values["attention_bias"]
    attention = grouped_attention(values | heads, rope, qkv_bias=bias, out_bias=bias)
    act = checked_activation("gpt_neox", "hidden_act", values["hidden_act"])
    mlp = MLP(values["intermediate_size"], True, act, gated=False)
    layer = LayerSpec(attention, mlp, parallel=values["use_parallel_residual"])
    return build_model(
        "gpt_neox",
        values,
        [layer] * values["num_hidden_layers"],
        norm="layernorm",
        weights=WEIGHTS,
        norm_eps=float(values["layer_norm_eps"]),
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    attention, mlp, rope = first_grouped_attention(spec), first_dense_mlp(spec), first_grouped_attention(spec).rope
    omitted = ("rms_norm_eps", "num_key_value_heads", "head_dim", "rope_theta")
    written = common_to_hf(spec, ARCHITECTURE, mlp.intermediate_size)
    return {name: value for name, value in written.items() if name not in omitted} | {
        "layer_norm_eps": spec.norm_eps,
        "rotary_pct": 1.0 if rope is None else rope.partial_rotary_factor,
        "rotary_emb_base": None if rope is None else rope.rope_theta,
        "use_parallel_residual": spec.layers[0].parallel,
        "attention_bias": attention.qkv_bias,
        "hidden_dropout": 0.0,
    }
