"""What Gemma 2 and 3 have in common: norms before and after attention and MLP, gated GELU, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import decoder_config, sliding_windows
from kumi.spec.families._shared.config_keys import DECODER, Key, activation
from kumi.spec.families._shared.decoder_config import dense, grouped
from kumi.spec.model import MLP, LayerSpec, ModelSpec
from kumi.spec.weight_rules import Rename, Weights

# Files call the norm after attention what other families call the one before the MLP.
WEIGHTS = Weights(
    (
        Rename("self_attn_post_norm", "post_attention_layernorm"),
        Rename("post_attention_layernorm", "pre_feedforward_layernorm"),
        Rename("mlp_post_norm", "post_feedforward_layernorm"),
    )
)
GEMMA_KEYS = {
    **DECODER,
    "num_key_value_heads": Key("integer?", 4),
    "head_dim": Key("integer", 256),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("true or false", True),
    "attention_bias": Key("true or false", False),
    "bos_token_id": Key("integer?", 2),
    "eos_token_id": Key("integer or list of integers?", 1),
    "pad_token_id": Key("integer?", 0),
    "layer_types": Key("list?", None),
    # Older configs have the first of these, or both; the second counts.
    "hidden_act": Key("text", "gelu_pytorch_tanh"),
    "hidden_activation": Key("text?", None),
    "query_pre_attn_scalar": Key("number", 256),
    "attn_logit_softcapping": Key("number?", None),
    "final_logit_softcapping": Key("number?", None),
    "use_bidirectional_attention": Key("true or false?", None),
    "cache_implementation": Key("text?", None),
}


def model(family: str, values: Mapping[str, Any], layers: Sequence[LayerSpec]) -> ModelSpec:
    """The ModelSpec of `values` with `layers`: zero-centred norms, embeddings as long as the hidden state is wide, and
    where it is given a cap on logits."""
    cap = values["final_logit_softcapping"]
    return decoder_config.model(
        family,
        values,
        layers,
        weights=WEIGHTS,
        zero_centered_norm=True,
        embedding_scale=values["hidden_size"] ** 0.5,
        logit_softcap=None if cap is None else _positive("final_logit_softcapping", cap),
    )


def scores(values: Mapping[str, Any]) -> dict[str, float | None]:
    """The fields of `Attention` that say what becomes of scores."""
    cap = values["attn_logit_softcapping"]
    return {
        "score_scale": _positive("query_pre_attn_scalar", values["query_pre_attn_scalar"]) ** -0.5,
        "softcap": None if cap is None else _positive("attn_logit_softcapping", cap),
    }


def _positive(name: str, value: float) -> float:
    if value <= 0:
        raise ModelError(f"config.json: {name}={value} of a gemma model must be above 0; correct it")
    return float(value)


def to_hf(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """The keys that both write."""
    attention, mlp = grouped(spec), dense(spec)
    scalar = attention.head_dim if attention.score_scale is None else round(attention.score_scale**-2, 6)
    return decoder_config.to_hf(spec, architecture, mlp.intermediate_size) | {
        "hidden_activation": mlp.hidden_act,
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": attention.softcap,
        "final_logit_softcapping": spec.logit_softcap,
        "attention_bias": attention.qkv_bias,
        "sliding_window": sliding_windows.width(spec) or 4096,
        "layer_types": sliding_windows.kinds(spec),
    }


def mlp(family: str, values: Mapping[str, Any]) -> MLP:
    """The gated MLP of `values`."""
    act = activation(family, "hidden_activation", values["hidden_activation"] or "gelu_pytorch_tanh")
    return MLP(values["intermediate_size"], hidden_act=act)
