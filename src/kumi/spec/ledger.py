"""The ledger: a model as a list of operations over named dims.

    spec  ->  ops(spec): embedding, layer 0 .. L-1, head, each with its parameters and the activations it saves
              params(spec): every parameter with its native name, which is kumi's own, dims, initialization
              num_params(spec), forward_flops(spec, ...), train_flops(spec, ...)

Parameter names and shapes, FLOPs, activation bytes, sharding and conversion are all read from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from kumi.spec.adapters import add_adapters, freeze_others
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
    "decayed_names",
    "embedding_ops",
    "forward_flops",
    "head_ops",
    "layer_ops",
    "logit_chunk",
    "num_params",
    "ops",
    "params",
    "tensors",
    "train_flops",
    "trained_names",
    "trained_params",
    "unique_layer_ops",
    "unique_ops",
]


# Names of weights: the token embedding, which is also the weight of a tied head, and the heads by `ModelSpec.head`.
EMBEDDING = "model.embed_tokens.weight"
HEADS = {"lm": "lm_head.weight", "score": "score.weight"}
# Prefix of the names of all tensors within layers; the index of the layer follows.
LAYERS = "model.layers."
# The number of logits in a chunk of the head, on accelerators and on a CPU; the minimum number of tokens of a chunk.
CHUNK_LOGITS, MIN_CHUNK_TOKENS = (2**27, 2**22), 128
# The number of elements of hidden states that a score head widens to float32 at a time.
SCORE_CHUNK = 2**24


@lru_cache(maxsize=1024)
def layer_ops(spec: ModelSpec, index: int) -> tuple[Op, ...]:
    """Return the operations of layer `index`, in order."""
    layer, prefix = spec.layers[index], f"{LAYERS}{index}"
    layer_operations = (*attention_ops(spec, layer, prefix), *mlp_ops(spec, layer, prefix))
    return layer_operations if spec.lora is None else add_adapters(spec.lora, layer_operations)


@lru_cache(maxsize=64)
def unique_layer_ops(spec: ModelSpec) -> tuple[tuple[Op, ...], ...]:
    """Return the operations of each unique layer, in the order of `spec.unique_layers()`, named as in its first use."""
    kinds, of_layer = spec.unique_layers()
    return tuple(layer_ops(spec, of_layer.index(kind)) for kind in range(len(kinds)))


@lru_cache(maxsize=1024)
def embedding_ops(spec: ModelSpec) -> tuple[Op, ...]:
    """Return the token embedding, which also saves the cosine and sine tables of RoPE.

    The learned positions and the norm of the embeddings follow, where the model has them.
    """
    vocab, embed = Dim("vocab", spec.vocab_size), Dim("embed", spec.hidden_size)
    table = Param(EMBEDDING, (vocab, embed))
    attentions = [layer.attends for layer in spec.layers if layer.attends is not None]
    ropes = [(rope, att.rotary_dim) for att in attentions if att.rope for rope in (att.rope, att.rope.key_rope)]
    sizes = {key: key[1] for key in ropes}
    rotary = tuple(Activation((Dim("head_dim", 2 * size),), "float32") for size in sizes.values())
    embeddings = [Op("model.embed_tokens", "embedding", vocab, embed, (table,), (Activation((), "int64"), *rotary))]
    if spec.learned_positions:
        positions = Dim("positions", spec.learned_positions)
        table = Param("model.embed_positions.weight", (positions, embed))
        embeddings.append(
            Op("model.embed_positions", "positions", positions, embed, (table,), (Activation((), "int64"),))
        )
    if spec.embedding_norm:
        embeddings.append(block_norm(spec, "model.embed_norm", embed))
    return _freeze_end(spec, embeddings)


@lru_cache(maxsize=1024)
def head_ops(spec: ModelSpec) -> tuple[Op, ...]:
    """Return the final norm and the head.

    The head is the output projection with the log-probabilities, computed in chunks of logits, or the score head.
    """
    embed, saved = Dim("embed", spec.hidden_size), (Activation((Dim("embed", spec.hidden_size),)),)
    if spec.head == "score":
        label = Dim("label", 1)
        head = Op("score", "score", embed, label, (Param(HEADS["score"], (label, embed)),), saved)
    else:
        vocab = Dim("vocab", spec.vocab_size)
        weight = () if spec.tie_word_embeddings else (Param(HEADS["lm"], (vocab, embed)),)
        head = Op("lm_head", "log_prob", embed, vocab, weight, saved)
    final = (block_norm(spec, "model.norm", embed), head)
    return _freeze_end(spec, final)


def _freeze_end(spec: ModelSpec, ops: Iterable[Op]) -> tuple[Op, ...]:
    """Return the operations `ops` of the embedding or the head, with the parameters that LoRA does not train frozen."""
    lora = spec.lora
    return tuple(ops if lora is None else (freeze_others(lora, op, tied=spec.tie_word_embeddings) for op in ops))


@lru_cache(maxsize=64)
def ops(spec: ModelSpec) -> tuple[Op, ...]:
    """Return every operation of the forward pass, in order."""
    layers = (op for index in range(spec.num_hidden_layers) for op in layer_ops(spec, index))
    return (*embedding_ops(spec), *layers, *head_ops(spec))


@lru_cache(maxsize=64)
def params(spec: ModelSpec) -> tuple[Param, ...]:
    """Return every parameter, in the order of the forward pass; a tied head adds none."""
    return tuple(param for op in ops(spec) for param in op.params)


@lru_cache(maxsize=64)
def decayed_names(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the parameters with weight decay (see `Param.decayed`)."""
    return frozenset(param.name for param in params(spec) if param.decayed)


@lru_cache(maxsize=64)
def trained_names(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the trained parameters: all, or those of adapters and of modules trained beside them."""
    return frozenset(param.name for param in params(spec) if not param.frozen)


def is_layer_param(param: Param) -> bool:
    """True if `param` belongs to a layer, not to the embedding or the head."""
    return param.name.startswith(LAYERS)


@lru_cache(maxsize=64)
def buffers(spec: ModelSpec) -> tuple[Param, ...]:
    """Return every buffer: tensors that are not trained, in float32 whatever the dtype of the parameters is."""
    return tuple(buffer for op in ops(spec) for buffer in op.buffers)


@lru_cache(maxsize=64)
def tensors(spec: ModelSpec) -> tuple[Param, ...]:
    """Return the tensors of a saved model, parameters and buffers, in the order of the forward pass."""
    return tuple(tensor for op in ops(spec) for tensor in (*op.params, *op.buffers))


def num_params(spec: ModelSpec) -> int:
    """Return the number of parameters; a tied head counts once."""
    return sum(count * param.numel for op, count in unique_ops(spec) for param in op.params)


def trained_params(spec: ModelSpec) -> int:
    """Return the number of elements of the trained parameters (see `trained_names`)."""
    return sum(count * param.numel for op, count in unique_ops(spec) for param in op.params if not param.frozen)


def active_params(spec: ModelSpec) -> float:
    """Return the number of parameters that a token uses: of routed experts, only those to which the token is routed."""
    return sum(
        count * param.numel * (op.passes / op.experts if op.experts else 1)
        for op, count in unique_ops(spec)
        for param in op.params
    )


def unique_ops(spec: ModelSpec) -> Iterator[tuple[Op, int]]:
    """Yield the operations of the embedding, of each unique layer and of the head, and how often each occurs.

    The number of operations does not grow with the number of identical layers.
    """
    layers = Counter(spec.unique_layers()[1])
    yield from ((op, 1) for op in (*embedding_ops(spec), *head_ops(spec)))
    yield from ((op, layers[kind]) for kind, ops_ in enumerate(unique_layer_ops(spec)) for op in ops_)


def forward_flops(spec: ModelSpec, tokens: int, seq_len: int) -> int:
    """Return the FLOPs of a forward pass over `tokens` in sequences of `seq_len` (see `Op.forward_flops`)."""
    return sum(count * op.forward_flops(tokens, seq_len) for op, count in unique_ops(spec))


def logit_chunk(vocab_size: int, device_kind: str) -> int:
    """Return the tokens of a chunk of the head: enough for fast matmuls, but with few logits beside the model."""
    return max(MIN_CHUNK_TOKENS, CHUNK_LOGITS[device_kind == "cpu"] // vocab_size)


def train_flops(
    spec: ModelSpec, tokens: int, seq_len: int, attention_len: float | None = None, head_tokens: int | None = None
) -> int:
    """Return the model FLOPs of a training step: forward and backward without recomputation, and without the gradients
    of frozen weights.

    This is the numerator of model FLOPs utilization (MFU), with attention counted in full (see `Op.forward_flops`).

    `head_tokens`: tokens with log-probs; by default all.
    """
    of_head = tokens if head_tokens is None else head_tokens
    return sum(
        count * op.train_flops(of_head if op.kind == "log_prob" else tokens, seq_len, attention_len)
        for op, count in unique_ops(spec)
    )
