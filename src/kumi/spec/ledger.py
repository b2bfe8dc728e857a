"""A model as a list of operations over named dims.

    spec  ->  ops(spec): embedding, layer 0 .. L-1, head, each with its parameters and the activations it keeps
              params(spec): every parameter's native name, dims, initialisation
              forward_flops(spec, ...), saved_activations(...)

Parameter names and shapes, FLOPs, activation bytes, sharding and conversion are all read from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from kumi.spec.model import LayerSpec, ModelSpec
from kumi.spec.op import Activation, Dim, Op, Param

__all__ = ["Activation", "Dim", "Op", "Param", "attention_ops", "embedding_ops", "forward_flops", "head_ops",
           "layer_ops", "logit_chunk", "mlp_ops", "num_params", "ops", "params", "train_flops"]  # fmt: skip


def _linear(name: str, source: Dim, target: Dim, *, bias: bool, saved: tuple[Activation, ...] = ()) -> Op:
    weight = Param(f"{name}.weight", (target, source))
    params = (weight, Param(f"{name}.bias", (target,), "zeros")) if bias else (weight,)
    return Op(name, "linear", source, target, params, saved)


def _norm(name: str, dim: Dim, weight: Dim, saved: tuple[Activation, ...]) -> Op:
    return Op(name, "norm", dim, dim, (Param(f"{name}.weight", (weight,), "ones"),), saved)


def attention_ops(spec: ModelSpec, layer: LayerSpec, prefix: str) -> Iterator[Op]:
    """The operations of `x + attention(norm(x))`."""
    att, embed = layer.attention, Dim("embed", spec.hidden_size)
    heads = Dim("heads", att.num_attention_heads * att.head_dim, att.head_dim)
    kv_heads = Dim("kv_heads", att.num_key_value_heads * att.head_dim, att.head_dim)
    query_count, head = Dim("heads", att.num_attention_heads), Dim("head_dim", att.head_dim)
    name = f"{prefix}.self_attn"
    yield _norm(f"{prefix}.input_layernorm", embed, embed, (Activation((embed,)), Activation((), "float32")))
    yield _linear(f"{name}.q_proj", embed, heads, bias=att.qkv_bias, saved=(Activation((embed,)),))
    yield _linear(f"{name}.k_proj", embed, kv_heads, bias=att.qkv_bias)
    yield _linear(f"{name}.v_proj", embed, kv_heads, bias=att.qkv_bias)
    if att.qk_norm:
        for which, dim in (("q_norm", heads), ("k_norm", kv_heads)):
            count = Dim(dim.name, dim.count)
            yield _norm(f"{name}.{which}", dim, head, (Activation((dim,)), Activation((count,), "float32")))
    yield Op(f"{name}.rope", "rope", heads, heads)
    kept = (Activation((heads,)), Activation((kv_heads,)), Activation((kv_heads,)),
            Activation((heads,)), Activation((query_count,), "float32"))  # fmt: skip
    yield Op(f"{name}.attention", "attention", heads, heads, saved=kept, heads=att.num_attention_heads,
             kv_size=2 * kv_heads.size, window=att.sliding_window)  # fmt: skip
    yield _linear(f"{name}.o_proj", heads, embed, bias=att.out_bias)
    yield Op(f"{name}.add", "add", embed, embed)


def mlp_ops(spec: ModelSpec, layer: LayerSpec, prefix: str) -> Iterator[Op]:
    """The operations of `x + mlp(norm(x))`."""
    embed, ffn = Dim("embed", spec.hidden_size), Dim("ffn", layer.mlp.intermediate_size)
    bias, name = layer.mlp.bias, f"{prefix}.mlp"
    yield _norm(f"{prefix}.post_attention_layernorm", embed, embed, (Activation((embed,)), Activation((), "float32")))
    yield _linear(f"{name}.gate_proj", embed, ffn, bias=bias, saved=(Activation((embed,)),))
    yield _linear(f"{name}.up_proj", embed, ffn, bias=bias)
    yield Op(f"{name}.gate", "gate", ffn, ffn, saved=(Activation((ffn,)), Activation((ffn,))))
    yield _linear(f"{name}.down_proj", ffn, embed, bias=bias, saved=(Activation((ffn,)),))
    yield Op(f"{name}.add", "add", embed, embed)


def layer_ops(spec: ModelSpec, index: int) -> tuple[Op, ...]:
    """The operations of layer `index`, in order."""
    layer, prefix = spec.layers[index], f"model.layers.{index}"
    return (*attention_ops(spec, layer, prefix), *mlp_ops(spec, layer, prefix))


def embedding_ops(spec: ModelSpec) -> tuple[Op, ...]:
    """The token embedding, and the rotary tables (cosine and sine) that all layers share."""
    vocab, embed = Dim("vocab", spec.vocab_size), Dim("embed", spec.hidden_size)
    table = Param("model.embed_tokens.weight", (vocab, embed))
    sizes = {(layer.attention.rope, layer.attention.head_dim): layer.attention.head_dim for layer in spec.layers}
    rotary = tuple(Activation((Dim("head_dim", 2 * size),), "float32") for size in sizes.values())
    return (Op("model.embed_tokens", "embedding", vocab, embed, (table,), (Activation((), "int64"), *rotary)),)


def head_ops(spec: ModelSpec) -> tuple[Op, ...]:
    """The final norm, the output projection and the log-probabilities, whose logits are never held whole."""
    vocab, embed = Dim("vocab", spec.vocab_size), Dim("embed", spec.hidden_size)
    weight = () if spec.tie_word_embeddings else (Param("lm_head.weight", (vocab, embed)),)
    norm = _norm("model.norm", embed, embed, (Activation((embed,)), Activation((), "float32")))
    return (norm, Op("lm_head", "log_prob", embed, vocab, weight, (Activation((embed,)),)))


@lru_cache(maxsize=64)
def ops(spec: ModelSpec) -> tuple[Op, ...]:
    """Every operation of the forward pass, in order."""
    layers = (op for index in range(spec.num_hidden_layers) for op in layer_ops(spec, index))
    return (*embedding_ops(spec), *layers, *head_ops(spec))


@lru_cache(maxsize=64)
def params(spec: ModelSpec) -> tuple[Param, ...]:
    """Every parameter, in the order of the forward pass; a tied head adds none."""
    return tuple(param for op in ops(spec) for param in op.params)


def num_params(spec: ModelSpec) -> int:
    """How many parameters the model has, a tied head counted once."""
    return sum(param.numel for param in params(spec))


def forward_flops(spec: ModelSpec, tokens: int, seq_len: int) -> int:
    """Floating-point operations of one forward pass over `tokens` in rows of `seq_len` (see `Op.forward_flops`)."""
    return sum(op.forward_flops(tokens, seq_len) for op in ops(spec))


def logit_chunk(vocab_size: int, device_kind: str) -> int:
    """How many tokens' logits the head holds at a time: enough for full-speed matrix products, few beside the model."""
    return max(128, (2**22 if device_kind == "cpu" else 2**27) // vocab_size)


def train_flops(spec: ModelSpec, tokens: int, seq_len: int) -> int:
    """Model FLOPs of a train step: a forward and a backward of twice its size, without recomputation.

    This is the numerator of model FLOPs utilisation (MFU), with attention counted in full.
    """
    return 3 * forward_flops(spec, tokens, seq_len)
