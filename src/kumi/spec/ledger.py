"""A model as a list of operations over named dims.

    spec  ->  ops(spec): embedding, layer 0 .. L-1, head, each with its parameters and the activations it keeps
              params(spec): every parameter's native name, dims, initialisation
              num_params(spec), forward_flops(spec, ...), train_flops(spec, ...)

Parameter names and shapes, FLOPs, activation bytes, sharding and conversion are all read from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from kumi.spec.adapters import adapted, frozen
from kumi.spec.attention_ops import attention_ops
from kumi.spec.mlp_ops import mlp_ops
from kumi.spec.model import ModelSpec
from kumi.spec.op import Activation, Dim, Op, Param, block_norm

__all__ = [
    "Activation",
    "Dim",
    "Op",
    "Param",
    "active_params",
    "buffers",
    "decayed",
    "embedding_ops",
    "forward_flops",
    "head_ops",
    "kind_ops",
    "layer_ops",
    "logit_chunk",
    "num_params",
    "ops",
    "params",
    "tensors",
    "train_flops",
    "trained_params",
    "unique_ops",
]


# The token table, which is the head's too where they are tied, and the head.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What names of tensors within layers begin with; a number follows.
LAYERS = "model.layers."
# Logits that the head holds at a time, on other devices and on a CPU, and tokens that it takes at least.
LOGITS, LEAST_CHUNK = (2**27, 2**22), 128


@lru_cache(maxsize=1024)
def layer_ops(spec: ModelSpec, index: int) -> tuple[Op, ...]:
    """The operations of layer `index`, in order."""
    layer, prefix = spec.layers[index], f"{LAYERS}{index}"
    found = (*attention_ops(spec, layer, prefix), *mlp_ops(spec, layer, prefix))
    return found if spec.lora is None else adapted(spec.lora, found)


@lru_cache(maxsize=64)
def kind_ops(spec: ModelSpec) -> tuple[tuple[Op, ...], ...]:
    """The operations of every kind of layer, in the order of `spec.layer_kinds()`: those of the first of its layers."""
    kinds, of_layer = spec.layer_kinds()
    return tuple(layer_ops(spec, of_layer.index(kind)) for kind in range(len(kinds)))


@lru_cache(maxsize=1024)
def embedding_ops(spec: ModelSpec) -> tuple[Op, ...]:
    """The embedding of tokens, the rotary tables (cosine and sine) that all layers share, and learned positions."""
    vocab, embed = Dim("vocab", spec.vocab_size), Dim("embed", spec.hidden_size)
    table = Param(EMBEDDING, (vocab, embed))
    attentions = [layer.attends for layer in spec.layers if layer.attends is not None]
    ropes = [(rope, att.rotary_dim) for att in attentions if att.rope for rope in (att.rope, att.rope.of_keys)]
    sizes = {key: key[1] for key in ropes}
    rotary = tuple(Activation((Dim("head_dim", 2 * size),), "float32") for size in sizes.values())
    found = [Op("model.embed_tokens", "embedding", vocab, embed, (table,), (Activation((), "int64"), *rotary))]
    if spec.learned_positions:
        positions = Dim("positions", spec.learned_positions)
        table = Param("model.embed_positions.weight", (positions, embed))
        found.append(Op("model.embed_positions", "positions", positions, embed, (table,), (Activation((), "int64"),)))
    if spec.embedding_norm:
        found.append(block_norm(spec, "model.embed_norm", embed))
    return tuple(found) if spec.lora is None else tuple(map(frozen, found))


@lru_cache(maxsize=1024)
def head_ops(spec: ModelSpec) -> tuple[Op, ...]:
    """The final norm, the output projection and the log-probabilities, whose logits are never held whole."""
    vocab, embed = Dim("vocab", spec.vocab_size), Dim("embed", spec.hidden_size)
    weight = () if spec.tie_word_embeddings else (Param(HEAD, (vocab, embed)),)
    head = Op("lm_head", "log_prob", embed, vocab, weight, (Activation((embed,)),))
    found = (block_norm(spec, "model.norm", embed), head)
    return found if spec.lora is None else tuple(map(frozen, found))


@lru_cache(maxsize=64)
def ops(spec: ModelSpec) -> tuple[Op, ...]:
    """Every operation of the forward pass, in order."""
    layers = (op for index in range(spec.num_hidden_layers) for op in layer_ops(spec, index))
    return (*embedding_ops(spec), *layers, *head_ops(spec))


@lru_cache(maxsize=64)
def params(spec: ModelSpec) -> tuple[Param, ...]:
    """Every parameter, in the order of the forward pass; a tied head adds none."""
    return tuple(param for op in ops(spec) for param in op.params)


@lru_cache(maxsize=64)
def decayed(spec: ModelSpec) -> frozenset[str]:
    """The names of the parameters that weight decay applies to (see `Param.decayed`)."""
    return frozenset(param.name for param in params(spec) if param.decayed)


def is_hidden(param: Param) -> bool:
    """Whether `param` belongs to a layer, not to the embedding or the head."""
    return param.name.startswith(LAYERS)


@lru_cache(maxsize=64)
def buffers(spec: ModelSpec) -> tuple[Param, ...]:
    """Every tensor that belongs to the model and is not trained, in float32 whatever the parameters are in."""
    return tuple(buffer for op in ops(spec) for buffer in op.buffers)


@lru_cache(maxsize=64)
def tensors(spec: ModelSpec) -> tuple[Param, ...]:
    """Parameters and buffers: what a saved model has, in the order of the forward pass."""
    return tuple(tensor for op in ops(spec) for tensor in (*op.params, *op.buffers))


def num_params(spec: ModelSpec) -> int:
    """How many parameters the model has, a tied head counted once."""
    return sum(count * param.numel for op, count in unique_ops(spec) for param in op.params)


def trained_params(spec: ModelSpec) -> int:
    """How many parameters are trained: all, or those of adapters."""
    return sum(count * param.numel for op, count in unique_ops(spec) for param in op.params if not param.frozen)


def active_params(spec: ModelSpec) -> float:
    """How many parameters a token meets: of routed experts' only the share that it is sent to, all others in full."""
    return sum(
        count * param.numel * (op.passes / op.experts if op.experts else 1)
        for op, count in unique_ops(spec)
        for param in op.params
    )


def unique_ops(spec: ModelSpec) -> Iterator[tuple[Op, int]]:
    """Yield the operations of the embedding, of each kind of layer and of the head, and how often each occurs.

    The cost does not grow with the number of equal layers.
    """
    layers = Counter(spec.layer_kinds()[1])
    yield from ((op, 1) for op in (*embedding_ops(spec), *head_ops(spec)))
    yield from ((op, layers[kind]) for kind, ops_ in enumerate(kind_ops(spec)) for op in ops_)


def forward_flops(spec: ModelSpec, tokens: int, seq_len: int) -> int:
    """Floating-point operations of one forward pass over `tokens` in rows of `seq_len` (see `Op.forward_flops`)."""
    return sum(count * op.forward_flops(tokens, seq_len) for op, count in unique_ops(spec))


def logit_chunk(vocab_size: int, device_kind: str) -> int:
    """How many tokens' logits the head holds at a time: enough for full-speed matrix products, few beside the model."""
    return max(LEAST_CHUNK, LOGITS[device_kind == "cpu"] // vocab_size)


def train_flops(spec: ModelSpec, tokens: int, seq_len: int) -> int:
    """Model FLOPs of a train step: a forward and a backward of twice its size, without recomputation, and without the
    gradients of frozen weights.

    This is the numerator of model FLOPs utilisation (MFU), with attention counted in full.
    """
    return sum(count * op.train_flops(tokens, seq_len) for op, count in unique_ops(spec))
