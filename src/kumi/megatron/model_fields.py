"""A model as fields of Megatron-Core's TransformerConfig, and the reasons why these cannot express it.

Sources: megatron-core 0.16.1 and 0.19.2: transformer/transformer_config.py, models/gpt/gpt_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.spec.families._shared.rope_config import mscales_to_hf
from kumi.spec.model import MLP, Attention, LatentAttention, ModelSpec, MoE, Rope
from kumi.spec.uniform_layers import UniformLayers, uniform_layers

_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_SQUARED_RELU = ("relu2",)
# The constants of Megatron's Llama 3.1 scaling: low_freq_factor, high_freq_factor, original_max_position_embeddings.
LLAMA3_ROPE = (1.0, 4.0, 8192)


def unsupported_by_megatron(model: ModelSpec) -> Iterator[str]:
    """Yield the reasons why Megatron-Core's GPT model cannot compute `model`."""
    uniform = uniform_layers(model)
    if uniform is None:
        yield (
            "the layers differ in more than windows and experts, or are not attention with an mlp each; "
            "Megatron-Core's GPT model has one kind of layer (windows by --window-attn-skip-freq, experts by "
            "--moe-layer-freq)"
        )
        return
    yield from _block_problems(model, uniform)
    if uniform.dense is not None:
        yield from _mlp_problems(uniform.dense)
    if uniform.moe is not None:
        yield from _moe_problems(uniform.moe)
    if isinstance(uniform.attention, Attention):
        yield from _attention_problems(uniform.attention)
    yield from _bias_problems(uniform)
    yield from _scale_problems(model, uniform)
    yield from _rope_problems(uniform.attention.rope, latent=isinstance(uniform.attention, LatentAttention))


def _block_problems(model: ModelSpec, uniform: UniformLayers) -> Iterator[str]:
    """Yield the reasons in the norms, and in the order of attention and mlp."""
    if uniform.layer.parallel:
        yield "attention and mlp are parallel; Megatron-Core's GPT layer has them in sequence"
    if uniform.layer.post_norms:
        yield "the outputs of attention and mlp are normalized; Megatron-Core's GPT layer normalizes only their inputs"
    if model.embedding_norm:
        yield "the embeddings are normalized; Megatron-Core's GPT model has no norm after the embedding"


def _mlp_problems(mlp: MLP) -> Iterator[str]:
    """Yield the reason in the activation of a dense `mlp`."""
    supported = mlp.hidden_act == "silu" if mlp.gated else mlp.hidden_act in (*_GELU, *_SQUARED_RELU)
    if not supported:
        yield (
            f"hidden_act='{mlp.hidden_act}' with{'' if mlp.gated else 'out'} a gate: Megatron-LM has SwiGLU (gated "
            f"silu), and gelu and squared relu without a gate"
        )


def _moe_problems(moe: MoE) -> Iterator[str]:
    """Yield the reasons in the experts and their router."""
    if moe.hidden_act != "silu" or moe.bias:
        yield "experts with a bias or another activation than silu: Megatron-LM has SwiGLU experts without bias"
    if moe.shared_gate:
        yield "the output of the shared expert has a gate: not every supported version of Megatron-Core has one"
    if moe.scoring_func == "sigmoid" and not moe.norm_topk_prob:
        yield "norm_topk_prob=false with sigmoid scores: Megatron-Core always normalizes sigmoid scores"
    summed, theirs = 2 if moe.has_correction_bias else 1, moe.num_experts_per_tok // moe.topk_group
    if moe.n_group > 1 and summed != theirs:
        yield (
            f"the score of an expert group is the sum of its {summed} best; Megatron-Core sums the {theirs} best "
            f"(num_experts_per_tok / topk_group)"
        )


def _attention_problems(attention: Attention) -> Iterator[str]:
    """Yield the reasons in positions and norms of queries and keys."""
    if attention.alibi:
        yield "alibi positions: Megatron-Core has rotary and learned positions"
    if attention.qk_norm_whole:
        yield "queries and keys are normalized over all heads together; Megatron-Core normalizes each head"


def _bias_problems(uniform: UniformLayers) -> Iterator[str]:
    """Yield a reason if the matrices with a bias are not a set that Megatron-Core can have."""
    qkv, others = _biases(uniform)
    if len(others) > 1 or (not qkv and True in others):
        yield (
            "biases on only some of the matrices; Megatron-Core has them on all, on the query, key and value "
            "projection alone, or on none"
        )


def _scale_problems(model: ModelSpec, uniform: UniformLayers) -> Iterator[str]:
    """Yield a reason for each factor, soft cap or bias-free norm that Megatron-Core's GPT model does not have."""
    factors = {
        "embeddings are": model.embedding_scale,
        "logits are": model.logit_scale,
        "the outputs of attention and mlp are": model.residual_scale,
    }
    yield from (
        f"{quantity} multiplied by {factor:g}; Megatron-Core's GPT model multiplies by 1"
        for quantity, factor in factors.items()
        if factor != 1.0
    )
    if model.logit_softcap is not None or (isinstance(uniform.attention, Attention) and uniform.attention.softcap):
        yield "scores or logits have a soft cap (tanh); Megatron-Core's GPT model has none"
    if isinstance(uniform.attention, Attention) and uniform.attention.score_scale is not None:
        yield (
            f"scores are multiplied by {uniform.attention.score_scale:g}; Megatron-LM multiplies by 1 / sqrt(head_dim)"
        )
    if model.norm == "layernorm" and not model.norm_bias:
        yield "layer norms have no bias; those of Megatron-Core have one"


def _biases(uniform: UniformLayers) -> tuple[bool, set[bool]]:
    """Return whether the query, key and value projections have a bias, and the set of these flags of all other
    matrices."""
    attention = uniform.attention
    mlp = {uniform.dense.bias} if uniform.dense is not None else set()
    if isinstance(attention, LatentAttention):
        return attention.bias, {attention.bias, *mlp}
    return attention.qkv_bias, {attention.out_bias, *mlp}


def _rope_problems(rope: Rope | None, *, latent: bool) -> Iterator[str]:
    """Yield the reasons in RoPE; `latent`: it is that of latent attention."""
    if rope is not None and rope.interleave:
        yield "RoPE rotates adjacent dimensions; kumi exports rotation of dimensions half a head apart"
    if rope is None or rope.scaling is None:
        return
    if rope.scaling == "longrope":
        yield "longrope positions: Megatron-Core does not have them"
    if rope.scaling == "yarn" and not latent:
        yield "yarn positions: Megatron-LM has them for latent attention only"
    if rope.scaling not in ("yarn", "longrope") and latent:
        yield f"{rope.scaling} positions with latent attention: Megatron-Core has plain and yarn positions there"
    if rope.scaling == "linear" and rope.factor != int(rope.factor):
        yield f"linear RoPE scaling by {rope.factor}: Megatron-LM needs an integer factor"
    built_in = (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings)
    if rope.scaling == "llama3" and built_in != LLAMA3_ROPE:
        yield (
            f"llama3 positions with low_freq_factor, high_freq_factor, original_max_position_embeddings = "
            f"{built_in}: Megatron-Core has {LLAMA3_ROPE} built in"
        )


def model_config_fields(model: ModelSpec) -> dict[str, Any]:
    """Return `model` as fields of TransformerConfig (MLATransformerConfig for latent attention)."""
    uniform = uniform_layers(model)
    assert uniform is not None, "unsupported_by_megatron() refuses other models"
    dense = uniform.dense.intermediate_size if uniform.dense is not None else None
    gated = uniform.dense is None or uniform.dense.gated
    squared = uniform.dense is not None and uniform.dense.hidden_act in _SQUARED_RELU
    return {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": dense if dense is not None else _moe(uniform).moe_intermediate_size,
        "num_attention_heads": uniform.attention.num_attention_heads,
        **_attention_fields(uniform),
        "gated_linear_unit": gated,
        "activation_func": "silu" if gated else "squared_relu" if squared else "gelu",
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        **_bias_fields(uniform),
        "init_method_std": model.initializer_range,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **(_moe_fields(uniform) if uniform.moe is not None else {}),
    }


def _moe(uniform: UniformLayers) -> MoE:
    assert uniform.moe is not None
    return uniform.moe


def _attention_fields(uniform: UniformLayers) -> dict[str, Any]:
    """Return the fields for attention."""
    attention = uniform.attention
    if isinstance(attention, LatentAttention):
        return {
            "multi_latent_attention": True,
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_nope_head_dim,
            "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
            "qk_layernorm": True,
            **_latent_rope(attention),
        }
    # Megatron's window does not count the query's own position. `skip` has a 1 for each layer with a window.
    window = None if uniform.window is None else (uniform.window - 1, 0)
    skip = (
        None if window is None or None not in uniform.windows else [int(size is not None) for size in uniform.windows]
    )
    return {
        "num_query_groups": attention.num_key_value_heads,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm,
        **({"window_size": window} if window is not None else {}),
        **({"window_attn_skip_freq": skip} if skip is not None else {}),
        **({"softmax_type": "learnable"} if attention.sinks else {}),
    }


def _latent_rope(attention: LatentAttention) -> dict[str, Any]:
    """Return the RoPE fields of MLATransformerConfig, where yarn is the default."""
    rope = attention.rope
    if rope.scaling is None:
        return {"rope_type": "rope", "rotary_base": rope.rope_theta}
    return {
        "rope_type": "yarn",
        "rotary_base": rope.rope_theta,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        **mscales_to_hf(attention),
    }


def _bias_fields(uniform: UniformLayers) -> dict[str, Any]:
    qkv, others = _biases(uniform)
    return {"add_bias_linear": True in others, "add_qkv_bias": qkv}


def _moe_fields(uniform: UniformLayers) -> dict[str, Any]:
    """Return the fields for experts."""
    moe = _moe(uniform)
    softmax, groups, shared = moe.scoring_func == "softmax", moe.n_group > 1, moe.shared_intermediate_size > 0
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.moe_intermediate_size,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_router_score_function": moe.scoring_func,
        # Without normalization, the softmax is over all experts, before the choice of the best.
        "moe_router_pre_softmax": softmax and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if moe.routed_scaling_factor == 1.0 else moe.routed_scaling_factor,
        **({"moe_router_num_groups": moe.n_group, "moe_router_group_topk": moe.topk_group} if groups else {}),
        **({"moe_shared_expert_intermediate_size": moe.shared_intermediate_size} if shared else {}),
        **({"moe_layer_freq": [int(flag) for flag in uniform.experts]} if not all(uniform.experts) else {}),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
