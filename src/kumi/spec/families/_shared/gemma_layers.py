"""Helpers of Gemma 2 and 3: norms before and after attention and MLP, gated GELU, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import decoder_config, sliding_windows
from kumi.spec.families._shared.config_keys import DECODER, Key, checked_activation
from kumi.spec.families._shared.decoder_config import first_dense_mlp, first_grouped_attention
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.weight_rules import Rename, Weights

# In files, post_attention_layernorm is the norm after attention; in other families, it is the norm before the MLP.
# The rules have kumi's names first (see `kumi.spec.weight_rules`).
_WEIGHTS = Weights(
    (
        Rename("self_attn_post_norm", "post_attention_layernorm"),
        Rename("post_attention_layernorm", "pre_feedforward_layernorm"),
        Rename("mlp_post_norm", "post_feedforward_layernorm"),
    )
)
# The keys that Gemma 2 and 3 both have.
GEMMA_KEYS = {
    **DECODER,
    "num_key_value_heads": Key("integer or null", 4),
    "head_dim": Key("integer", 256),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("true or false", True),
    "attention_bias": Key("true or false", False),
    "bos_token_id": Key("integer or null", 2),
    "eos_token_id": Key("integer or list of integers or null", 1),
    "pad_token_id": Key("integer or null", 0),
    "layer_types": Key("list or null", None),
    # In older configs; without effect, as in transformers, which reads hidden_activation.
    "hidden_act": Key("text", "gelu_pytorch_tanh"),
    "hidden_activation": Key("text or null", None),
    "query_pre_attn_scalar": Key("number", 256),
    "attn_logit_softcapping": Key("number or null", None),
    "final_logit_softcapping": Key("number or null", None),
    "use_bidirectional_attention": Key("true or false or null", None),
    "cache_implementation": Key("text or null", None),
}


def gemma_model(family: str, values: Mapping[str, Any], layers: Sequence[LayerSpec]) -> ModelSpec:
    """Return the ModelSpec of `values` with `layers`: zero-centered norms, embeddings scaled by sqrt(hidden_size), and
    an optional logit softcap.
    """
    cap = values["final_logit_softcapping"]
    return decoder_config.build_model(
        family,
        values,
        layers,
        weights=_WEIGHTS,
        zero_centered_norm=True,
        embedding_scale=values["hidden_size"] ** 0.5,
        logit_softcap=None if cap is None else _positive("final_logit_softcapping", cap),
    )


def score_fields(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the fields of `Attention` that scale and cap the scores."""
    cap = values["attn_logit_softcapping"]
    return {
        "score_scale": _positive("query_pre_attn_scalar", values["query_pre_attn_scalar"]) ** -0.5,
        "softcap": None if cap is None else _positive("attn_logit_softcapping", cap),
    }


def _positive(name: str, value: float) -> float:
    """Return `value`, which the key `name` has. Raise ModelError unless it is above 0."""
    if value <= 0:
        raise ModelError(f"config.json: {name}={value} of a gemma model must be above 0; correct it")
    return float(value)


def gemma_to_hf(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """Return the config.json keys that Gemma 2 and 3 both write."""
    attention, mlp = first_grouped_attention(spec), first_dense_mlp(spec)
    scalar = attention.head_dim if attention.score_scale is None else round(attention.score_scale**-2, 6)
    return decoder_config.common_to_hf(spec, architecture, mlp.intermediate_size) | {
        "hidden_activation": mlp.hidden_act,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": spec.logit_softcap,
        "attention_bias": attention.qkv_bias,
        "sliding_window": sliding_windows.first_window(spec) or 4096,
        "layer_types": sliding_windows.layer_types(spec),
    }


def gemma_mlp(family: str, values: Mapping[str, Any]) -> MLP:
    """Return the gated MLP of `values`."""
    act = checked_activation(family, "hidden_activation", values["hidden_activation"] or "gelu_pytorch_tanh")
    return MLP(values["intermediate_size"], hidden_act=act)
