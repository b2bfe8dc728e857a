"""Upper bounds on the numbers in a config.json, checked before anything is built from them.

Each bound allows models many times larger than any published one, and keeps all products of sizes within the planner's
integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief

_WIDTH, _HEADS, _EXPERTS, _LAYERS, _CONTEXT = 2**20, 2**16, 2**16, 1024, 2**31

# The largest allowed value of each size; in comments, the largest published value known to us.
_LARGEST = {
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

# Bounds on other integers (token ids, counts) and on floating-point numbers; a RoPE base is below 1e12.
_LARGEST_INTEGER, _LARGEST_NUMBER = 2**40, 1e15

# Total parameters: a thousand times those of the largest published model.
_LARGEST_MODEL = 10**15


def check_bound(name: str, value: Any) -> None:
    """Raise ModelError when `value`, or a number in the list `value`, exceeds the bound of the key `name`."""
    for number in value if isinstance(value, list) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        largest = _LARGEST.get(name, _LARGEST_INTEGER if isinstance(number, int) else _LARGEST_NUMBER)
        if abs(number) > largest and abs(number) != float("inf"):
            raise ModelError(
                f"config.json: {name}={brief(number, 40)} is more than the limit of {largest:,}; correct it"
            )


def check_num_params(parameters: int) -> None:
    """Raise ModelError when a model of this many `parameters` exceeds `_LARGEST_MODEL`."""
    if parameters > _LARGEST_MODEL:
        raise ModelError(
            f"config.json: the model has {parameters:,} parameters, more than the limit of {_LARGEST_MODEL:,}; "
            f"correct its sizes"
        )


def check_ranges(values: Mapping[str, Any]) -> None:
    """Raise ModelError unless each size is at least 1 and within its bound, and no epsilon or initializer_range is
    negative."""
    for name in _LARGEST:
        value = values.get(name)
        if value is not None and value < 1:
            raise ModelError(f"config.json: {name}={value} must be 1 or more; correct it")
        check_bound(name, value)
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "initializer_range"):
        if values.get(name, 0) < 0:
            raise ModelError(f"config.json: {name}={values[name]} must not be negative; correct it")
