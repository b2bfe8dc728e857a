"""Activation memory per token: saved between forward and backward pass, and transient in the backward pass.

The ledger (`kumi.spec.ledger`) lists the tensors that each operation saves with kumi's kernels; other trainers
("engines") save more. A tensor with a dim that tp shards is divided by tp; any other tensor only under sequence
parallelism. cp reduces the tokens of a rank, not the bytes per token. For a GPT layer in 16 bits with dropout and
materialized attention scores the sum is the 34 + 5as/h bytes per token and hidden element of Korthikanti et al., 2022,
arXiv:2205.05198, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, Ints, LayoutBatch
from kumi.plan.row_cache import RowCache
from kumi.plan.unique_rows import unique_rows
from kumi.spec.job import Job
from kumi.spec.ledger import embedding_ops, head_ops, unique_layer_ops
from kumi.spec.op import Activation, Dim, Op
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import DIM_TO_AXIS, shard_size, tp_style
from kumi.spec.techniques import is_tiled

# Operations that `recompute = "selective"` does not recompute: matmuls and communication.
_EXPENSIVE_KINDS = ("linear", "lora", "attention", "scan", "router", "dispatch", "combine")

# Float32 tensors of the input's size that the backward pass of a gated norm has alive at a time.
_GATED_NORM_FLOAT32 = 3

# Attention implementations that write the scores to memory.
_MATERIALIZES_SCORES = ("fused-softmax", "eager")


class LayerActivations(NamedTuple):
    """Activation bytes per token of one layer, (rows,) each.

    `none`, `selective`, `full`: saved for the backward pass, by kind of recomputation.
    `recomputed_selective`, `recomputed_full`: recomputed in the backward pass.
    `gradients`: activation gradients that are alive at a time in the backward pass.
    """

    none: Floats
    selective: Floats
    full: Floats
    recomputed_selective: Floats
    recomputed_full: Floats
    gradients: Floats


class ModelActivations(NamedTuple):
    """Activation bytes per token of the parts of a model, (rows,) each.

    `layers`: one entry for each kind of layer.
    `embedding`, `head`: saved by the embedding and the head.
    `boundary`: size of the hidden state between two layers.
    """

    layers: tuple[LayerActivations, ...]
    embedding: Floats
    head: Floats
    boundary: Floats


def model_activations(job: Job, layouts: LayoutBatch, cache: RowCache | None = None) -> ModelActivations:
    """Return the activation bytes of all parts of the model on a rank, per token that the rank processes.

    `cache`: activations of the same job that were computed before.
    """
    columns = layouts.tp, layouts.expert_tp, layouts.sequence_parallel, layouts.tiles
    first, index = unique_rows(*columns)
    unique = layouts.take(first)

    def compute(rows: Ints) -> Floats:
        """Return the figures of every kind of layer, of the embedding and of the head, (figures, rows)."""
        sizes, model = _ActivationSizes(job, unique.take(rows)), job.model
        layers = [sizes.layer(ops) for ops in unique_layer_ops(model)]
        ends = [sizes.total(sizes.saved, ops) for ops in (embedding_ops(model), head_ops(model))]
        figures = [figure for layer in layers for figure in layer]
        return np.stack([np.broadcast_to(figure, len(rows)) for figure in (*figures, *ends)])

    figures = compute(np.arange(len(first))) if cache is None else cache.figures([c[first] for c in columns], compute)
    *of_layers, embedding, head = figures[:, index]
    count = len(LayerActivations._fields)
    layers = [LayerActivations(*of_layers[start : start + count]) for start in range(0, len(of_layers), count)]
    return ModelActivations(tuple(layers), embedding, head, layers[0].full)


class _ActivationSizes:
    """Bytes per token of activations on a rank, (rows,).

    `outside_tp`: the number of ranks over which activations between the tensor-parallel matmuls are split: tp under
    sequence parallelism, else 1.
    `tiles`: the number of parts in which a dense feed-forward layer is computed, one after another.
    """

    def __init__(self, job: Job, layouts: LayoutBatch) -> None:
        self.job, self.engine = job, job.engine
        self.tp, self.expert_tp = layouts.tp.astype(np.float64), layouts.expert_tp.astype(np.float64)
        self.outside_tp = np.where(layouts.sequence_parallel > 0, self.tp, 1.0)
        self.tiles = layouts.tiles.astype(np.float64)
        self.itemsize = job.itemsize
        self.itemsizes = {**ITEMSIZE, "compute": self.itemsize}

    def layer(self, ops: Sequence[Op]) -> LayerActivations:
        """Return the activations of a layer with operations `ops`."""
        saved, inputs = self.total(self.saved, ops), self.itemsize * self.numel((ops[0].source,))
        if self.engine.selective == "attention":
            recomputed = self.total(self.scores, ops)
            selective = saved - recomputed
        else:
            selective = inputs + self.total(self.output, self._not_recomputed(ops))
            recomputed = self.total(self.output, self._recomputed(ops)) + self.total(self.engine_saved, ops)
        gradients = np.max([self.gradients(op) for op in ops], axis=0)
        return LayerActivations(saved, selective, inputs, recomputed, saved, gradients)

    def _not_recomputed(self, ops: Sequence[Op]) -> list[Op]:
        """Return the operations whose outputs selective recomputation saves."""
        if self.engine.selective == "products":
            return [op for op in ops if op.kind in _EXPENSIVE_KINDS]
        # The output of every second matmul is saved; grouped matmuls of experts are not counted.
        linears = [op for op in ops if op.kind == "linear" and not op.experts]
        return [*linears[::2], *(op for op in ops if op.kind == "attention")]

    def _recomputed(self, ops: Sequence[Op]) -> list[Op]:
        """Return the operations that selective recomputation runs in the backward pass."""
        saved = self._not_recomputed(ops)
        return [op for op in ops if op not in saved]

    def total(self, size: Callable[[Op], Floats], ops: Iterable[Op]) -> Floats:
        """Return the sum of `size(op)` over `ops`."""
        total = np.zeros_like(self.tp)
        for op in ops:
            total = total + size(op)
        return total

    def saved(self, op: Op) -> Floats:
        """Return the bytes that `op` saves for its backward pass."""
        gathered = self.engine.gathered_inputs and tp_style(op) == "column" and not op.experts
        tensors = self._bytes(op.saved, at_experts=bool(op.experts)) * (self.outside_tp if gathered else 1.0)
        if is_tiled(self.job.model, op) and op.source.name == "ffn":
            tensors = np.where(self.tiles > 1, 0.0, tensors)  # tiles save their input only
        return tensors + self.engine_saved(op) + self.scores(op)

    def engine_saved(self, op: Op) -> Floats:
        """Return the bytes that the engine saves beyond the ledger: op-by-op differentiation and dropout masks."""
        tensors = []
        if op.kind in self.engine.autograd:
            tensors.append(Activation((op.source,), "float32") if op.kind == "norm" else op.saved[0])
        if self.engine.dropout and op.kind in ("add", "embedding"):
            tensors.append(Activation((op.target,), "uint8"))
        return self._bytes(tensors, at_experts=bool(op.experts))

    def _bytes(self, tensors: Iterable[Activation], *, at_experts: bool) -> Floats:
        """Return the bytes of `tensors`; `at_experts` as in `numel`."""
        total = np.zeros_like(self.tp)
        for tensor in tensors:
            total = total + self.itemsizes[tensor.dtype] * self.numel(tensor.dims, at_experts=at_experts)
        return total

    def scores(self, op: Op) -> Floats:
        """Return the bytes of materialized attention scores: seq_len elements for each head.

        A fused softmax saves its output. An unfused softmax saves its float32 output and the rounded copy. Dropout
        saves its mask and its output.
        """
        if op.kind != "attention" or self.engine.attention not in _MATERIALIZES_SCORES:
            return np.zeros_like(self.tp)
        fused = self.engine.attention == "fused-softmax"
        itemsize = self.itemsize if fused else ITEMSIZE["float32"] + self.itemsize
        itemsize += (1 + self.itemsize) * self.engine.dropout
        heads = shard_size(Dim("heads", op.heads), self.tp)
        scores: Floats = itemsize * self.job.batch.seq_len * heads
        return scores

    def output(self, op: Op) -> Floats:
        """Return the bytes of the output of `op`; attention also returns the log-sum-exp of its scores."""
        statistics = [tensor for tensor in op.saved if op.kind == "attention" and tensor.dtype == "float32"]
        output = self.itemsize * self._numel_of_copies(op, op.target)
        return output + self._bytes(statistics, at_experts=bool(op.experts))

    def gradients(self, op: Op) -> Floats:
        """Return the bytes of activation gradients that the backward pass of `op` has alive at a time.

        These are the gradients of its inputs and outputs, and float32 intermediates.
        """
        attention_inputs = 1 + op.kv_size / op.source.size
        inputs = {"gate": 2, "gated_norm": 2, "attention": attention_inputs, "scan": attention_inputs}.get(op.kind, 1)
        source, target = (self._numel_of_copies(op, dim) for dim in (op.source, op.target))
        total: Floats = self.itemsize * (inputs * source + target)
        if op.kind == "gate" and is_tiled(self.job.model, op):
            # Three outputs of a tile are recomputed.
            total = total + np.where(self.tiles > 1, 3 * self.itemsize * source, 0.0)
        if op.kind == "gated_norm":
            total = total + _GATED_NORM_FLOAT32 * ITEMSIZE["float32"] * source
        if op.kind == "scan":
            # The float32 states at chunk boundaries.
            size = op.kv_size // (2 * op.source.count)
            total = total + ITEMSIZE["float32"] * self.numel((op.source,)) * size / op.chunk
        return total + self._score_gradients(op)

    def _score_gradients(self, op: Op) -> Floats:
        """Return the bytes of the gradients of scores and softmax, in float32 unless the softmax is fused."""
        materialized = self.scores(op) > 0
        itemsize = self.itemsize if self.engine.attention == "fused-softmax" else ITEMSIZE["float32"]
        heads = shard_size(Dim("heads", op.heads), self.tp)
        return np.where(materialized, 2.0 * itemsize * self.job.batch.seq_len * heads, 0.0)

    def _numel_of_copies(self, op: Op, dim: Dim) -> Floats:
        """Return the elements per token of an input or output of `op` along `dim`, for all routed copies of a token."""
        passes = (Dim("routed", int(op.passes)),) if op.passes > 1 else ()
        tiles = self.tiles if dim.name == "ffn" and is_tiled(self.job.model, op) else 1.0
        return self.numel((*passes, dim), at_experts=bool(op.experts)) / tiles

    def numel(self, dims: tuple[Dim, ...], *, at_experts: bool = False) -> Floats:
        """Return the elements per token of a tensor with `dims` on a rank.

        A leading dim "routed" counts the experts that a token is routed to. With `at_experts`, tokens have been
        dispatched: the ranks that shard an expert along expert_tp all have its tokens, so that with balanced routing a
        rank has expert_tp / tp times the routed tokens.
        """
        numel, sharded = np.ones_like(self.tp), False
        routed = bool(dims) and dims[0].name == "routed"
        for dim in dims:
            along_tp = DIM_TO_AXIS.get(dim.name) == "tp"
            numel = numel * (shard_size(dim, self.tp) if along_tp else dim.size)
            sharded = sharded or along_tp
        if sharded:
            return numel
        if routed:
            return numel * (self.expert_tp if at_experts else 1.0) / self.tp
        return numel / self.outside_tp
