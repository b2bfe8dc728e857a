"""Random configurations of families whose layers are not Llama's, as in test_random_configs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random_configs import LENGTH, check

from kumi.spec.families._shared.config_keys import ACTIVATIONS

# Those that transformers has under these names, too.
ACTS = st.sampled_from([name for name in ACTIVATIONS if name != "swish"])


@st.composite
def gpt2(draw, heads, head_dim):
    yes = st.booleans()
    return {
        "n_inner": draw(st.none() | st.integers(1, 40)),
        "activation_function": draw(ACTS),
        "max_position_embeddings": draw(st.integers(LENGTH, 40)),
        "scale_attn_weights": draw(yes),
        "scale_attn_by_inverse_layer_idx": draw(yes),
    }


@st.composite
def gpt_neox(draw, heads, head_dim):
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": draw(st.sampled_from((0.25, 0.5, 1.0))),
        },
        "use_parallel_residual": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "hidden_act": draw(ACTS),
        "intermediate_size": draw(st.integers(1, 40)),
    }


@st.composite
def falcon(draw, heads, head_dim):
    kind = draw(st.sampled_from(("one key head", "all key heads", "groups", "groups and one norm")))
    new = kind.startswith("groups")
    keys = {
        "new_decoder_architecture": new,
        "multi_query": kind == "one key head",
        "alibi": draw(st.booleans()),
        "parallel_attn": new or draw(st.booleans()),
        "bias": draw(st.booleans()),
        "activation": draw(ACTS),
        "ffn_hidden_size": draw(st.integers(1, 40)),
    }
    if new:
        keys["num_kv_heads"] = draw(st.sampled_from([count for count in range(1, heads + 1) if heads % count == 0]))
    return keys | ({"num_ln_in_parallel_attn": 1} if kind == "groups and one norm" else {})


def bloom(heads, head_dim):
    return st.just({})  # all of its shape follows from its sizes


@st.composite
def gpt_oss(draw, heads, head_dim):
    experts = draw(st.integers(1, 5))
    return {
        "head_dim": head_dim,
        "num_key_value_heads": draw(st.sampled_from((1, heads))),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "intermediate_size": draw(st.integers(1, 40)),
        "sliding_window": draw(st.integers(1, LENGTH + 2)),
        "swiglu_limit": draw(st.sampled_from((0.3, 7.0))),
        "attention_bias": draw(st.booleans()),
    }


FAMILIES = {"GPT2": gpt2, "GPTNeoX": gpt_neox, "Falcon": falcon, "Bloom": bloom, "GptOss": gpt_oss}


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 20)
def test_a_random_configuration(family, data):
    heads, head_dim = data.draw(st.integers(1, 6)), data.draw(st.sampled_from((8, 16)))
    changes = {
        "num_hidden_layers": data.draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "hidden_size": heads * head_dim,
        "vocab_size": data.draw(st.integers(2, 70)),
        "tie_word_embeddings": data.draw(st.booleans()),
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    check(family, changes | data.draw(FAMILIES[family](heads, head_dim)))
