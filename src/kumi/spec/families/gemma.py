"""What Gemma 2 and 3 have in common: norms before and after attention and MLP, gated GELU, sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families.keys import DECODER, Key, activation
from kumi.spec.model import MLP
from kumi.spec.rules import Rename, Weights

# Files call the norm after attention what other families call the one before the MLP.
WEIGHTS = Weights((
    Rename("self_attn_post_norm", "post_attention_layernorm"),
    Rename("post_attention_layernorm", "pre_feedforward_layernorm"),
    Rename("mlp_post_norm", "post_feedforward_layernorm"),
))  # fmt: skip
GEMMA_KEYS = {
    **DECODER,
    "num_key_value_heads": Key("integer?", 4),
    "head_dim": Key("integer", 256),
    "rms_norm_eps": Key("number", 1e-6),
    "tie_word_embeddings": Key("true or false", True),
    "attention_bias": Key("true or false", False),
    "layer_types": Key("list?", None),
    # Older configs have the first of these, or both; the second counts.
    "hidden_act": Key("text", "gelu_pytorch_tanh"),
    "hidden_activation": Key("text?", None),
    # Element-wise, and therefore without weight in a plan.
    "query_pre_attn_scalar": Key("number", 256),
    "attn_logit_softcapping": Key("number?", None),
    "final_logit_softcapping": Key("number?", None),
    "use_bidirectional_attention": Key("true or false?", None),
    "cache_implementation": Key("text?", None),
}


def mlp(family: str, values: Mapping[str, Any]) -> MLP:
    """The gated MLP of `values`."""
    act = activation(family, "hidden_activation", values["hidden_activation"] or "gelu_pytorch_tanh")
    return MLP(values["intermediate_size"], hidden_act=act)
