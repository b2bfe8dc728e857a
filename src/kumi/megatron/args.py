"""Convert a model to the arguments of Megatron-LM, which a checkpoint of Megatron contains, and back to a config.json.

Sources: megatron/training/arguments.py and checkpointing.py of Megatron-LM (megatron-core 0.16 and 0.19), and the
run_config.yaml of Megatron-Bridge 0.3, which has fields of TransformerConfig instead of arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.megatron.model_fields import LLAMA3_ROPE, model_config_fields
from kumi.spec.model import ModelSpec, Rope
from kumi.spec.uniform_layers import uniform_layers

# Arguments that Megatron-LM's --use-checkpoint-args does not restore -> their defaults.
_NOT_RESTORED: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "qk_layernorm": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "softmax_type": "vanilla",
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "multi_latent_attention": False,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": None,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
# Fields of TransformerConfig -> the arguments that set them, where the names differ.
ARGUMENT_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "num_moe_experts": "num_experts",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
# Fields of MLATransformerConfig without an argument -> their defaults.
MLA_DEFAULTS = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
# The end of error messages about arguments from which no config.json can be made.
_REMEDY = "give the model's config.json with --config"


def to_args(model: ModelSpec, *, dtype: str, padded_vocab: int) -> argparse.Namespace | None:
    """Return the arguments for Megatron-LM's --use-checkpoint-args, or None for a model that they cannot express."""
    uniform = uniform_layers(model)
    if uniform is None:
        return None
    fields = model_config_fields(model)
    gated, activation = fields.pop("gated_linear_unit"), fields.pop("activation_func")
    heads, groups = fields["num_attention_heads"], fields.get("num_query_groups")
    values: dict[str, Any] = {ARGUMENT_NAMES.get(name, name): value for name, value in fields.items()}
    values |= {
        "swiglu": gated and activation == "silu",
        "squared_relu": activation == "squared_relu",
        "group_query_attention": groups is not None and groups != heads,
        "max_position_embeddings": model.max_position_embeddings,
        "seq_length": model.max_position_embeddings,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "apply_layernorm_1p": model.zero_centered_norm,
        "vocab_size": model.vocab_size,
        # Without this argument, Megatron-LM pads the vocabulary for its tensor parallelism.
        **({"padded_vocab_size": padded_vocab} if padded_vocab != model.vocab_size else {}),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        **_position_args(model, uniform.attention.rope),
        "ckpt_format": "torch_dist",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
    }
    if uniform.moe is not None:
        values["moe_router_enable_expert_bias"] = uniform.moe.has_correction_bias
        values["moe_aux_loss_coeff"] = uniform.moe.router_aux_loss_coef
    return argparse.Namespace(**values)


def flags_to_add(args: argparse.Namespace) -> str:
    """Return the flags that Megatron-LM needs in addition to --use-checkpoint-args; empty if there are none."""
    words = []
    for name, default in _NOT_RESTORED.items():
        value = getattr(args, name, default)
        if value == default:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            pair = ",".join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f'"{pair}"' if isinstance(value, list) else str(pair))
    return " ".join(words)


def _position_args(model: ModelSpec, rope: Rope | None) -> dict[str, Any]:
    """Return the arguments for positions; `rope` is that of all layers, None for models without."""
    if rope is None:
        return {"position_embedding_type": "learned_absolute" if model.learned_positions else "none"}
    scaled = rope.scaling == "llama3"
    return {
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rotary_base": int(rope.rope_theta) if rope.rope_theta == int(rope.rope_theta) else rope.rope_theta,
        "rotary_percent": rope.partial_rotary_factor,
        "rotary_interleaved": rope.interleave,
        "rotary_seq_len_interpolation_factor": int(rope.factor) if rope.scaling == "linear" else None,
        "use_rope_scaling": scaled,
        "rope_scaling_factor": rope.factor if scaled else 8.0,
    }


def to_config(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json of the model that Megatron's arguments describe, in a family that can express it.

    Raise ModelError if no family can, or if arguments are missing.
    """
    _check_recognizable(args)
    config = _common_keys(args)
    if args.get("multi_latent_attention"):
        return config | _latent_attention_keys(args)
    return config | (_expert_keys(args) if args.get("num_experts") else _dense_keys(args))


def from_run_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron-LM's arguments for the `model` of Megatron-Bridge's run_config.yaml."""
    activation = model.get("activation_func")
    name = str(activation.get("_target_", "") if isinstance(activation, Mapping) else activation).rpartition(".")[2]
    arguments = {ARGUMENT_NAMES.get(key, key): value for key, value in model.items() if not isinstance(value, Mapping)}
    return arguments | {
        "swiglu": bool(model.get("gated_linear_unit")) and name in ("silu", "SiLU"),
        "untie_embeddings_and_output_weights": not model.get("share_embeddings_and_output_weights", True),
        "max_position_embeddings": model.get("max_position_embeddings") or model.get("seq_length"),
        "use_rope_scaling": bool(model.get("rope_scaling")),
        "rotary_seq_len_interpolation_factor": model.get("seq_len_interpolation_factor"),
    }


# Argument -> its possible values for models of the families that `to_config` recognizes.
_RECOGNIZABLE: dict[str, tuple[Any, ...]] = {
    "swiglu": (True,),
    "normalization": ("RMSNorm",),
    "add_bias_linear": (False,),
    "apply_layernorm_1p": (False, None),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0, None),
    "rotary_interleaved": (False, None),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "softmax_type": ("vanilla", None),
    "window_attn_skip_freq": (None,),
    "mtp_num_layers": (None, 0),
    "glu_linear_offset": (0, None),
    "activation_func_clamp_value": (None,),
    "softmax_scale": (None,),
    "no_rope_freq": (None,),
    "moe_shared_expert_gate": (False, None),
    "moe_latent_size": (None,),
    "apply_residual_connection_post_layernorm": (False, None),
    "linear_attention_freq": (None,),
    "layernorm_zero_centered_gamma": (False, None),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
}


def _check_recognizable(args: Mapping[str, Any]) -> None:
    """Raise ModelError for a value that is not in `_RECOGNIZABLE`, or if swiglu or normalization is missing."""
    for name, allowed in _RECOGNIZABLE.items():
        if name in args and args[name] not in allowed:
            raise ModelError(
                f"the checkpoint's arguments have {name}={args[name]!r}, unlike all models that kumi recognizes by "
                f"their arguments; {_REMEDY}"
            )
    for name in ("swiglu", "normalization"):
        _required(args, name)


def _required(args: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of `names` among the arguments. Raise ModelError if all are missing."""
    for name in names:
        if args.get(name) is not None:
            return args[name]
    raise ModelError(f"the checkpoint's arguments lack {names[0]}; {_REMEDY}")


def _common_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that all recognized families have."""
    heads, hidden = _required(args, "num_attention_heads"), _required(args, "hidden_size")
    grouped = args.get("group_query_attention", args.get("num_query_groups") is not None)
    kv_heads = args.get("num_query_groups") if grouped else heads
    return {
        "vocab_size": _required(args, "vocab_size", "padded_vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": args.get("ffn_hidden_size") or 4 * hidden,
        "num_hidden_layers": _required(args, "num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "head_dim": args.get("kv_channels") or hidden // heads,
        # megatron-core 0.19 renamed the argument to the field's name.
        "rms_norm_eps": args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5,
        "max_position_embeddings": _required(args, "max_position_embeddings", "seq_length"),
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights"),
        "initializer_range": args.get("init_method_std") or 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": _dtype_name(args),
        **_rope_keys(args),
    }


def _dtype_name(args: Mapping[str, Any]) -> str:
    return "bfloat16" if args.get("bf16") else "float16" if args.get("fp16") else "float32"


def _rope_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_theta and rope_scaling, which is None, llama3 or linear."""
    theta = float(args.get("rotary_base") or 10_000)
    interpolation = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rope_scaling"):
        low, high, original = LLAMA3_ROPE
        table: dict[str, Any] | None = {
            "rope_type": "llama3",
            "factor": float(args.get("rope_scaling_factor") or 8.0),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    else:
        table = {"rope_type": "linear", "factor": float(interpolation)} if interpolation not in (None, 1) else None
    return {"rope_theta": theta, "rope_scaling": table}


def _window(args: Mapping[str, Any]) -> int | None:
    """Return the sliding window. Unlike Megatron's window_size, it counts the position of the query itself."""
    window = args.get("window_size")
    return None if window is None or window[0] < 0 else int(window[0]) + 1


def _dense_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model without experts: Mistral with a window, else Qwen 3, Qwen 2 or Llama.

    Raise ModelError if none of them has these norms and biases.
    """
    if _window(args) is not None:
        if args.get("qk_layernorm") or args.get("add_qkv_bias"):
            raise ModelError(
                f"the checkpoint's arguments have window_size={args['window_size']!r} with a norm or "
                f"bias of queries and keys, which no family that kumi recognizes has; {_REMEDY}"
            )
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": _window(args)}
    if args.get("qk_layernorm"):
        bias = bool(args.get("add_qkv_bias"))
        if bias:
            raise ModelError(
                f"the checkpoint's arguments have add_qkv_bias with qk_layernorm, which no family has; {_REMEDY}"
            )
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    if args.get("add_qkv_bias"):
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _expert_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model with experts, Mixtral or Qwen 3 MoE; raise ModelError if it is neither."""
    softmax = args.get("moe_router_score_function", "softmax") == "softmax"
    if (
        not softmax
        or args.get("moe_shared_expert_intermediate_size")
        or args.get("moe_router_num_groups")
        or (args.get("moe_router_topk_scaling_factor") not in (None, 1.0))
    ):
        raise ModelError(
            f"the checkpoint's arguments describe grouped-query attention with experts that have sigmoid scores, "
            f"groups, a scaling factor or a shared expert, which no family that kumi recognizes has; {_REMEDY}"
        )
    width = args.get("moe_ffn_hidden_size") or _required(args, "ffn_hidden_size")
    pre_softmax, every = bool(args.get("moe_router_pre_softmax")), args.get("moe_layer_freq") in (1, None)
    sparse = _has_experts(args)
    count, topk = args["num_experts"], _required(args, "moe_router_topk")
    if not args.get("qk_layernorm") and not args.get("add_qkv_bias") and not pre_softmax and (every or all(sparse)):
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": count,
            "num_experts_per_tok": topk,
            "intermediate_size": width,
            "sliding_window": _window(args),
        }
    if not args.get("qk_layernorm") or args.get("add_qkv_bias") or _window(args) is not None:
        raise ModelError(
            f"the checkpoint's arguments describe experts unlike those of all families that kumi recognizes by their "
            f"arguments; {_REMEDY}"
        )
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": count,
        "num_experts_per_tok": topk,
        "moe_intermediate_size": width,
        "norm_topk_prob": not pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, is_sparse in enumerate(sparse) if not is_sparse],
        "attention_bias": False,
    }


def _has_experts(args: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has experts: moe_layer_freq is n for every n-th layer, or a list."""
    pattern, layers = args.get("moe_layer_freq") or 1, int(_required(args, "num_layers"))
    if isinstance(pattern, int):
        return [index % pattern == 0 for index in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise ModelError(
            f"the checkpoint's arguments have moe_layer_freq={pattern!r}, which does not fit {layers} layers; {_REMEDY}"
        )
    return [bool(flag) for flag in pattern]


def _latent_attention_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of DeepSeek-V3 (sigmoid scores and a correction bias) or of DeepSeek-V2.

    Raise ModelError if the model is neither.
    """
    sparse, sigmoid = _has_experts(args), args.get("moe_router_score_function", "softmax") == "sigmoid"
    first = sparse.index(True) if True in sparse else len(sparse)
    width = _required(args, "moe_ffn_hidden_size", "ffn_hidden_size")
    shared = args.get("moe_shared_expert_intermediate_size") or 0
    if (
        not args.get("num_experts")
        or not all(sparse[first:])
        or shared % width
        or not args.get("qk_layernorm")
        or (sigmoid != bool(args.get("moe_router_enable_expert_bias")))
    ):
        raise ModelError(f"the checkpoint's arguments describe latent attention that no DeepSeek model has; {_REMEDY}")
    groups = args.get("moe_router_num_groups")
    version = "V3" if sigmoid else "V2"
    return {
        "architectures": [f"Deepseek{version}ForCausalLM"],
        "model_type": f"deepseek_{version.lower()}",
        "q_lora_rank": args.get("q_lora_rank"),
        "kv_lora_rank": _required(args, "kv_lora_rank"),
        "qk_nope_head_dim": _required(args, "qk_head_dim"),
        "qk_rope_head_dim": _required(args, "qk_pos_emb_head_dim"),
        "v_head_dim": _required(args, "v_head_dim"),
        "head_dim": None,
        "num_key_value_heads": args["num_attention_heads"],
        "n_routed_experts": args["num_experts"],
        "n_shared_experts": shared // width,
        "num_experts_per_tok": _required(args, "moe_router_topk"),
        "moe_intermediate_size": width,
        "first_k_dense_replace": first,
        "moe_layer_freq": 1,
        "n_group": groups,
        "topk_group": args.get("moe_router_group_topk"),
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups else "greedy",
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "norm_topk_prob": sigmoid or not args.get("moe_router_pre_softmax"),
        "routed_scaling_factor": float(args.get("moe_router_topk_scaling_factor") or 1.0),
        **_latent_rope_keys(args),
    }


def _latent_rope_keys(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE scaling of latent attention, which is YaRN by default in Megatron-Core."""
    if args.get("rope_type", "yarn") == "rope":
        return {}
    table = {
        "rope_type": "yarn",
        "factor": float(args.get("rotary_scaling_factor") or 40.0),
        "original_max_position_embeddings": int(args.get("original_max_position_embeddings") or 4096),
        "beta_fast": float(args.get("beta_fast") or 32.0),
        "beta_slow": float(args.get("beta_slow") or 1.0),
        "mscale": float(args.get("mscale") or 1.0),
        "mscale_all_dim": float(args.get("mscale_all_dim") or 0.0),
    }
    return {"rope_scaling": table}
