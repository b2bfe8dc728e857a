"""A model in the words of Megatron-Core: fields of its TransformerConfig, and what it has no words for.

Read in megatron-core 0.16.1 and 0.19.2: transformer/transformer_config.py, models/gpt/gpt_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.spec.families._shared.rope_config import mscales_to_hf
from kumi.spec.model import MLP, Attention, LatentAttention, ModelSpec, MoE, Rope
from kumi.spec.uniform_layers import Alike, alike

GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
SQUARED_RELU = ("relu2",)
# What Megatron's Llama 3.1 scaling has built in besides the factor.
LLAMA3 = (1.0, 4.0, 8192)


def problems(model: ModelSpec) -> Iterator[str]:
    """What of `model` Megatron-Core's GPT model cannot be told to be."""
    found = alike(model)
    if found is None:
        yield (
            "the layers differ in more than windows and experts, or are not attention with an mlp each; "
            "Megatron-Core's GPT model has one kind of layer (windows by --window-attn-skip-freq, experts by "
            "--moe-layer-freq)"
        )
        return
    yield from _block_problems(model, found)
    if found.dense is not None:
        yield from _mlp_problems(found.dense)
    if found.moe is not None:
        yield from _moe_problems(found.moe)
    if isinstance(found.attention, Attention):
        yield from _attention_problems(found.attention)
    yield from _bias_problems(found)
    yield from _scale_problems(model, found)
    yield from _rope_problems(found.attention.rope, latent=isinstance(found.attention, LatentAttention))


def _block_problems(model: ModelSpec, found: Alike) -> Iterator[str]:
    if found.layer.parallel:
        yield "attention and mlp stand side by side; Megatron-Core's GPT layer has one after the other"
    if found.layer.post_norms:
        yield "what attention and mlp return is normalised, too; Megatron-Core's GPT layer normalises what goes in"
    if model.embedding_norm:
        yield "the embeddings are normalised; Megatron-Core's GPT model has no norm after the embedding"


def _mlp_problems(mlp: MLP) -> Iterator[str]:
    known = mlp.hidden_act == "silu" if mlp.gated else mlp.hidden_act in (*GELU, *SQUARED_RELU)
    if not known:
        yield (
            f"hidden_act='{mlp.hidden_act}' with{'' if mlp.gated else 'out'} a gate: Megatron-LM has SwiGLU (gated "
            f"silu), and gelu and squared relu without a gate"
        )


def _moe_problems(moe: MoE) -> Iterator[str]:
    if moe.hidden_act != "silu" or moe.bias:
        yield "experts with a bias or another activation than silu: Megatron-LM has SwiGLU experts without bias"
    if moe.shared_gate:
        yield "a gate scales what the shared expert returns: not every Megatron-Core that is written for has one"
    if moe.scoring_func == "sigmoid" and not moe.norm_topk_prob:
        yield "norm_topk_prob=false with sigmoid scores: Megatron-Core always normalises sigmoid scores"
    best, theirs = 2 if moe.has_correction_bias else 1, moe.num_experts_per_tok // moe.topk_group
    if moe.n_group > 1 and best != theirs:
        yield (
            f"a group of experts is as good as the sum of its {best} best; Megatron-Core adds up the {theirs} best "
            f"(num_experts_per_tok / topk_group)"
        )


def _attention_problems(attention: Attention) -> Iterator[str]:
    if attention.alibi:
        yield "alibi positions: Megatron-Core has rotary and learned ones"
    if attention.qk_norm_whole:
        yield "queries and keys are normalised over all heads at once; Megatron-Core normalises each head"


def _bias_problems(found: Alike) -> Iterator[str]:
    qkv, others = biases(found)
    if len(others) > 1 or (not qkv and True in others):
        yield (
            "biases on some of the matrices only; Megatron-Core has them on all, on the query, key and value "
            "projection alone, or on none"
        )


def _scale_problems(model: ModelSpec, found: Alike) -> Iterator[str]:
    """Factors and bounds that Megatron-Core's GPT model has no words for, and norms without a bias."""
    factors = {
        "embeddings are": model.embedding_scale,
        "logits are": model.logit_scale,
        "what attention and mlp add is": model.residual_scale,
    }
    yield from (
        f"{what} multiplied by {factor:g}; Megatron-Core's GPT model multiplies by 1"
        for what, factor in factors.items()
        if factor != 1.0
    )
    if model.logit_softcap is not None or (isinstance(found.attention, Attention) and found.attention.softcap):
        yield "scores or logits are bounded by a tanh; Megatron-Core's GPT model bounds neither"
    if isinstance(found.attention, Attention) and found.attention.score_scale is not None:
        yield f"scores are multiplied by {found.attention.score_scale:g}; Megatron-LM multiplies by 1 / sqrt(head_dim)"
    if model.norm == "layernorm" and not model.norm_bias:
        yield "layer norms have no bias; Megatron-Core's have one"


def biases(found: Alike) -> tuple[bool, set[bool]]:
    """Whether the query, key and value projections have a bias, and what holds for all other matrices."""
    attention = found.attention
    mlp = {found.dense.bias} if found.dense is not None else set()
    if isinstance(attention, LatentAttention):
        return attention.bias, {attention.bias, *mlp}
    return attention.qkv_bias, {attention.out_bias, *mlp}


def _rope_problems(rope: Rope | None, *, latent: bool) -> Iterator[str]:
    if rope is not None and rope.interleave:
        yield "neighbouring dimensions are turned together; kumi has Megatron-LM turn those half a head apart"
    if rope is None or rope.scaling is None:
        return
    if rope.scaling == "longrope":
        yield "longrope positions: Megatron-Core does not know them"
    if rope.scaling == "yarn" and not latent:
        yield "yarn positions: Megatron-LM takes them for latent attention only"
    if rope.scaling not in ("yarn", "longrope") and latent:
        yield f"{rope.scaling} positions with latent attention: Megatron-Core has plain and yarn ones there"
    if rope.scaling == "linear" and rope.factor != int(rope.factor):
        yield f"positions stretched by {rope.factor}: Megatron-LM takes a whole factor"
    built_in = (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings)
    if rope.scaling == "llama3" and built_in != LLAMA3:
        yield (
            f"llama3 positions with low_freq_factor, high_freq_factor, original_max_position_embeddings = "
            f"{built_in}: Megatron-Core has {LLAMA3} built in"
        )


def fields(model: ModelSpec) -> dict[str, Any]:
    """`model` as fields of TransformerConfig (MLATransformerConfig for latent attention)."""
    found = alike(model)
    assert found is not None, "problems() refuses other models"
    dense = found.dense.intermediate_size if found.dense is not None else None
    gated = found.dense is None or found.dense.gated
    squared = found.dense is not None and found.dense.hidden_act in SQUARED_RELU
    return {
        "num_layers": model.num_hidden_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": dense if dense is not None else _moe(found).moe_intermediate_size,
        "num_attention_heads": found.attention.num_attention_heads,
        **_attention_fields(found),
        "gated_linear_unit": gated,
        "activation_func": "silu" if gated else "squared_relu" if squared else "gelu",
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        **_bias_fields(found),
        "init_method_std": model.initializer_range,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **(_moe_fields(found) if found.moe is not None else {}),
    }


def _moe(found: Alike) -> MoE:
    assert found.moe is not None
    return found.moe


def _attention_fields(found: Alike) -> dict[str, Any]:
    attention = found.attention
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
    window = None if found.window is None else (found.window - 1, 0)
    skip = None if window is None or None not in found.windows else [int(size is not None) for size in found.windows]
    return {
        "num_query_groups": attention.num_key_value_heads,
        "kv_channels": attention.head_dim,
        "qk_layernorm": attention.qk_norm,
        **({"window_size": window} if window is not None else {}),
        **({"window_attn_skip_freq": skip} if skip is not None else {}),
        **({"softmax_type": "learnable"} if attention.sinks else {}),
    }


def _latent_rope(attention: LatentAttention) -> dict[str, Any]:
    """Rotation in MLATransformerConfig, where yarn is the default."""
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


def _bias_fields(found: Alike) -> dict[str, Any]:
    qkv, others = biases(found)
    return {"add_bias_linear": True in others, "add_qkv_bias": qkv}


def _moe_fields(found: Alike) -> dict[str, Any]:
    moe = _moe(found)
    softmax, groups, shared = moe.scoring_func == "softmax", moe.n_group > 1, moe.shared_intermediate_size > 0
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.moe_intermediate_size,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_router_score_function": moe.scoring_func,
        # Without normalisation the softmax is over all experts, before the best are taken.
        "moe_router_pre_softmax": softmax and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if moe.routed_scaling_factor == 1.0 else moe.routed_scaling_factor,
        **({"moe_router_num_groups": moe.n_group, "moe_router_group_topk": moe.topk_group} if groups else {}),
        **({"moe_shared_expert_intermediate_size": moe.shared_intermediate_size} if shared else {}),
        **({"moe_layer_freq": [int(flag) for flag in found.experts]} if not all(found.experts) else {}),
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
