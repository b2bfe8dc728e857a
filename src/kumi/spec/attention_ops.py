"""The operations of x + attention(norm(x)) with FlashAttention, and the tensors that they save for the backward pass.

A Mamba mixer may take the place of attention: see `kumi.spec.mamba_ops`. The third argument of a `Dim` is the size of
its smallest part for a tensor-parallel rank, here a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from kumi.spec.mamba_ops import mamba_ops
from kumi.spec.model import Attention, LatentAttention, LayerSpec, Mamba, ModelSpec
from kumi.spec.op import Activation, Dim, Op, Param, block_norm, linear, norm


def attention_ops(spec: ModelSpec, layer: LayerSpec, prefix: str) -> Iterator[Op]:
    """Yield the operations of the attention or the Mamba mixer of the layer called `prefix`, in order.

    Yield nothing for a layer that has neither.
    """
    if layer.attention is None:
        return
    embed = Dim("embed", spec.hidden_size)
    name = f"{prefix}.{layer.attention.module_name}"
    if layer.pre_norms:
        yield block_norm(spec, f"{prefix}.input_layernorm", embed)
    yield from MIXER_OPS[type(layer.attention)](spec, layer.attention, name)
    if layer.post_norms:
        yield block_norm(spec, f"{prefix}.self_attn_post_norm", embed)
    yield Op(f"{name}.add", "add", embed, embed)


def _grouped_query_ops(spec: ModelSpec, att: Attention, name: str) -> Iterator[Op]:
    """Yield the operations of grouped-query attention on the normalized input."""
    embed = Dim("embed", spec.hidden_size)
    heads = Dim("heads", att.num_attention_heads * att.head_dim, att.head_dim)
    kv_heads = Dim("kv_heads", att.num_key_value_heads * att.head_dim, att.head_dim)
    yield linear(f"{name}.q_proj", embed, heads, bias=att.qkv_bias, saved=(Activation((embed,)),))
    yield linear(f"{name}.k_proj", embed, kv_heads, bias=att.qkv_bias)
    yield linear(f"{name}.v_proj", embed, kv_heads, bias=att.qkv_bias)
    if att.qk_norm:
        for which, dim in (("q_norm", heads), ("k_norm", kv_heads)):
            weight = dim if att.qk_norm_whole else Dim("head_dim", att.head_dim)
            init = "zeros" if spec.zero_centered_norm else "ones"
            yield norm(f"{name}.{which}", "rmsnorm", dim, weight=weight, init=init)
    if att.rope is not None:
        yield Op(f"{name}.rope", "rope", heads, heads, kv_size=2 * kv_heads.size)
    yield _attention_kernel(name, heads, heads, (kv_heads, kv_heads), window=att.sliding_window, sinks=att.sinks)
    yield linear(f"{name}.o_proj", heads, embed, bias=att.out_bias)


def _latent_ops(spec: ModelSpec, att: LatentAttention, name: str) -> Iterator[Op]:
    """Yield the operations of multi-head latent attention on the normalized input.

    The kernel reads the keys and values of every head, not the latent vector.
    """
    embed, count = Dim("embed", spec.hidden_size), att.num_attention_heads
    queries = Dim("heads", count * att.qk_head_dim, att.qk_head_dim)
    values = Dim("heads", count * att.v_head_dim, att.v_head_dim)
    kv_width, latent = att.qk_nope_head_dim + att.v_head_dim, Dim("kv_latent", att.kv_lora_rank)
    latent_and_key = Dim("kv_latent", att.kv_lora_rank + att.qk_rope_head_dim)
    saved = (Activation((embed,)),)
    if att.q_lora_rank is None:
        yield linear(f"{name}.q_proj", embed, queries, saved=saved)
    else:
        rank = Dim("q_latent", att.q_lora_rank)
        yield linear(f"{name}.q_a_proj", embed, rank, bias=att.bias, saved=saved)
        yield norm(f"{name}.q_a_layernorm", "rmsnorm", rank)
        yield linear(f"{name}.q_b_proj", rank, queries, saved=(Activation((rank,)),))
    yield linear(f"{name}.kv_a_proj_with_mqa", embed, latent_and_key, bias=att.bias)
    # The latent is a view of the projection's output, so saving it keeps the complete output.
    projected = (Activation((latent_and_key,)), Activation((), "float32"))
    yield replace(norm(f"{name}.kv_a_layernorm", "rmsnorm", latent), saved=projected)
    yield linear(
        f"{name}.kv_b_proj", latent, Dim("kv_heads", count * kv_width, kv_width), saved=(Activation((latent,)),)
    )
    yield Op(f"{name}.rope", "rope", queries, queries)
    keys = Dim("kv_heads", queries.size, queries.unit)
    yield _attention_kernel(name, queries, values, (keys, Dim("kv_heads", values.size, values.unit)))
    yield linear(f"{name}.o_proj", values, embed, bias=att.bias)


def _attention_kernel(
    name: str, queries: Dim, values: Dim, kv: tuple[Dim, Dim], *, window: int | None = None, sinks: bool = False
) -> Op:
    """Return the attention kernel with the dims of queries, of keys and values (`kv`) and of its output (`values`).

    It saves queries, keys, values, its output, and the log-sum-exp of each head's scores.
    """
    count = Dim("heads", queries.count)
    saved = (*(Activation((dim,)) for dim in (queries, *kv, values)), Activation((count,), "float32"))
    params = (Param(f"{name}.sinks", (count,)),) if sinks else ()
    return Op(
        f"{name}.attention",
        "attention",
        queries,
        values,
        params,
        saved,
        heads=count.size,
        kv_size=kv[0].size + kv[1].size,
        window=window,
    )


# Class of `LayerSpec.attention` -> a function of the model, the attention or mixer, and its name, that yields the
# operations on the normalized input.
MIXER_OPS: dict[type, Callable[[ModelSpec, Any, str], Iterator[Op]]] = {
    Attention: _grouped_query_ops,
    LatentAttention: _latent_ops,
    Mamba: mamba_ops,
}
