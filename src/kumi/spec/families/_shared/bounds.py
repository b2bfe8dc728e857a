"""How large the numbers of a model configuration may be: the one table, checked before anything is built of them.

Each bound leaves room for models many times as large as any that is published, and keeps every product of sizes within
the integers that the planner computes with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief

_WIDTH, _HEADS, _EXPERTS, _LAYERS, _CONTEXT = 2**20, 2**16, 2**16, 1024, 2**31

# The largest value of each size. In comments the largest that is published, as far as we know.
LARGEST = {
    "vocab_size": 2**24,  # 262,208 (Gemma 3)
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "head_dim", "v_head_dim"), _WIDTH),  # 18,432 (PaLM)
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), _WIDTH),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size", "conv_kernel", "chunk_size"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_hidden_size"), 4 * _WIDTH),  # 73,728
    "moe_shared_expert_intermediate_size": 4 * _WIDTH,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_sparse_step"), _LAYERS),  # 126 (Llama 3.1 405B)
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_kv_heads"), _HEADS),  # 128
    **dict.fromkeys(("mamba_num_heads", "n_groups"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),  # 2,048 (Switch)
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), _EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "sliding_window", "n_positions", "seq_length"), _CONTEXT),  # 10,485,760
}

# Integers that are no size (ids of tokens, counts), and numbers: 1e12 is larger than any base of rotary embeddings.
LARGEST_INTEGER, LARGEST_NUMBER = 2**40, 1e15

# All parameters together: a thousand times as many as the largest model has.
LARGEST_MODEL = 10**15


def check_bound(name: str, value: Any) -> None:
    """Raise ModelError when `value` of the key `name`, or a number in its list, is beyond its bound."""
    for number in value if isinstance(value, list) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        largest = LARGEST.get(name, LARGEST_INTEGER if isinstance(number, int) else LARGEST_NUMBER)
        if abs(number) > largest and abs(number) != float("inf"):
            raise ModelError(
                f"config.json: {name}={brief(number, 40)} is more than {largest:,}, the most that kumi "
                f"reads; correct it"
            )


def check_model(parameters: int) -> None:
    """Raise ModelError when a model has more `parameters` than kumi computes with."""
    if parameters > LARGEST_MODEL:
        raise ModelError(
            f"config.json: the model has {parameters:,} parameters, more than the {LARGEST_MODEL:,} that "
            f"kumi reads; correct its sizes"
        )


def check_least(values: Mapping[str, Any]) -> None:
    """Raise ModelError unless every size in `values` is 1 or more, and none of the small numbers is negative."""
    for name in LARGEST:
        value = values.get(name)
        if value is not None and value < 1:
            raise ModelError(f"config.json: {name}={value} must be 1 or more")
        check_bound(name, value)
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "initializer_range"):
        if values.get(name, 0) < 0:
            raise ModelError(f"config.json: {name}={values[name]} must not be negative; correct it")
