"""What a microbatch leaves on a rank between its forward and its backward, and what its backward makes besides.

The ledger says which tensors every operation keeps when its kernels are as sparing as kumi's; an engine that works
otherwise keeps more. On a rank, dims that tp cuts are divided by it, the rest by tp only under sequence parallelism,
all by cp. For a GPT layer in 16 bits with dropout and scores held in memory this comes to the 34 + 5as/h bytes a token
and hidden element of Korthikanti et al., 2022, arXiv:2205.05198, equation 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from kumi.plan.layout_batch import Columns, Floats, Ints
from kumi.plan.unique_rows import distinct
from kumi.spec.job import Job
from kumi.spec.ledger import embedding_ops, head_ops, kind_ops
from kumi.spec.op import Activation, Dim, Op
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import AXIS, cut, style
from kumi.spec.techniques import is_tiled

# Operations whose results `recompute = "selective"` keeps: they took a matrix product, or communication.
PRODUCTS = ("linear", "lora", "attention", "scan", "router", "dispatch", "combine")

# Tensors in float32, of the size of what goes in, that the backward of a gated norm holds at a time.
WIDE = 3

# Attention that writes the scores to memory.
HOLDS_SCORES = ("fused-softmax", "eager")


@dataclass(frozen=True)
class Kept:
    """Bytes a token of one layer, (rows,) each: what it keeps for its backward without recomputation (`none`), with
    `selective` and with `full`; what the backward makes again (`again_selective`, `again_full`); and the gradients
    that it holds at a time (`gradients`)."""

    none: Floats
    selective: Floats
    full: Floats
    again_selective: Floats
    again_full: Floats
    gradients: Floats

    def take(self, index: Ints) -> Kept:
        return Kept(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True)
class Ledger:
    """`Kept` of every kind of layer, and bytes a token that the embedding and the head keep, and of what passes from
    one layer to the next (`boundary`), (rows,) each."""

    layers: tuple[Kept, ...]
    embedding: Floats
    head: Floats
    boundary: Floats


def ledger(job: Job, x: Columns) -> Ledger:
    """What the parts of the model keep on a rank of every row, each token that the rank sees counted once."""
    first, index = distinct(x.tp, x.expert_tp, x.sequence_parallel, x.tiles)
    rank, model = _Rank(job, x.take(first)), job.model
    layers = [rank.layer(ops) for ops in kind_ops(model)]
    embedding, head = (rank.total(rank.saved, ops)[index] for ops in (embedding_ops(model), head_ops(model)))
    return Ledger(tuple(one.take(index) for one in layers), embedding, head, layers[0].full[index])


class _Rank:
    """Sizes of tensors on a rank of every row."""

    def __init__(self, job: Job, x: Columns) -> None:
        self.job, self.engine = job, job.engine
        self.tp, self.expert_tp = x.tp.astype(np.float64), x.expert_tp.astype(np.float64)
        self.outside = np.where(x.sequence_parallel > 0, self.tp, 1.0)
        self.tiles = x.tiles.astype(np.float64)
        self.compute = job.itemsize
        self.sizes = {**ITEMSIZE, "compute": self.compute}

    def layer(self, ops: Sequence[Op]) -> Kept:
        """`Kept` of a layer with these operations."""
        every, inputs = self.total(self.saved, ops), self.compute * self.numel((ops[0].source,))
        results, inside = self.total(self.result, self._spared(ops)), self.total(self.scores, ops)
        if self.engine.selective == "attention":
            selective, again = every - inside, inside
        else:
            selective = inputs + results
            again = self.total(self.result, self._cheap(ops)) + self.total(self.extra, ops)
        gradients = np.max([self.gradient(op) for op in ops], axis=0)
        return Kept(every, selective, inputs, again, every, gradients)

    def _spared(self, ops: Sequence[Op]) -> list[Op]:
        """The operations whose results selective recomputation keeps."""
        if self.engine.selective == "products":
            return [op for op in ops if op.kind in PRODUCTS]
        # Products of many experts at once are no products to it.
        linears = [op for op in ops if op.kind == "linear" and not op.experts]
        return [*linears[::2], *(op for op in ops if op.kind == "attention")]

    def _cheap(self, ops: Sequence[Op]) -> list[Op]:
        spared = self._spared(ops)
        return [op for op in ops if op not in spared]

    def total(self, size: Callable[[Op], Floats], ops: Iterable[Op]) -> Floats:
        found = np.zeros_like(self.tp)
        for op in ops:
            found = found + size(op)
        return found

    def saved(self, op: Op) -> Floats:
        """Bytes a token that `op` keeps for its backward."""
        whole = self.engine.gathered_inputs and style(op) == "column" and not op.experts
        own = self._bytes(op.saved, at_home=not op.experts) * (self.outside if whole else 1.0)
        if is_tiled(self.job.model, op) and op.source.name == "ffn":
            own = np.where(self.tiles > 1, 0.0, own)  # of tiles only the input is kept
        return own + self.extra(op) + self.scores(op)

    def extra(self, op: Op) -> Floats:
        """Bytes a token that op-by-op differentiation and dropout keep of `op` beyond the ledger."""
        found = []
        if op.kind in self.engine.autograd:
            found.append(Activation((op.source,), "float32") if op.kind == "norm" else op.saved[0])
        if self.engine.dropout and op.kind in ("add", "embedding"):
            found.append(Activation((op.target,), "uint8"))
        return self._bytes(found, at_home=not op.experts)

    def _bytes(self, kept: Iterable[Activation], *, at_home: bool) -> Floats:
        found = np.zeros_like(self.tp)
        for one in kept:
            found = found + self.sizes[one.dtype] * self.numel(one.dims, at_home=at_home)
        return found

    def scores(self, op: Op) -> Floats:
        """Bytes a token of the attention scores that are held in memory: a row of the sequence's length for every head.

        A fused softmax keeps its result; otherwise it keeps that in float32, and what it is rounded to. Dropout keeps
        its mask and its result.
        """
        if op.kind != "attention" or self.engine.attention not in HOLDS_SCORES:
            return np.zeros_like(self.tp)
        each = self.compute if self.engine.attention == "fused-softmax" else ITEMSIZE["float32"] + self.compute
        each += (1 + self.compute) * self.engine.dropout
        heads = cut(Dim("heads", op.heads), self.tp)
        found: Floats = each * self.job.batch.seq_len * heads
        return found

    def result(self, op: Op) -> Floats:
        """Bytes a token of what `op` returns; attention returns the log-sum-exp of its scores, too."""
        beside = [one for one in op.saved if op.kind == "attention" and one.dtype == "float32"]
        return self.compute * self._rows(op, op.target) + self._bytes(beside, at_home=not op.experts)

    def gradient(self, op: Op) -> Floats:
        """Bytes a token of the gradients of what `op` takes and returns, and of the residual stream."""
        others = 1 + op.kv_size / op.source.size
        inputs = {"gate": 2, "gated_norm": 2, "attention": others, "scan": others}.get(op.kind, 1)
        found: Floats = self.compute * (inputs * self._rows(op, op.source) + self._rows(op, op.target))
        if op.kind == "gate" and is_tiled(self.job.model, op):
            # A tile's three results are made again.
            found = found + np.where(self.tiles > 1, 3 * self.compute * self._rows(op, op.source), 0.0)
        if op.kind == "gated_norm":
            found = found + WIDE * ITEMSIZE["float32"] * self._rows(op, op.source)
        if op.kind == "scan":
            # The states at the chunks' beginnings, in float32.
            size = op.kv_size // (2 * op.source.count)
            found = found + ITEMSIZE["float32"] * self.numel((op.source,)) * size / op.chunk
        return found + self._score_gradients(op)

    def _score_gradients(self, op: Op) -> Floats:
        """Of the scores and of their softmax, in float32 where that is not fused."""
        held = self.scores(op) > 0
        each = self.compute if self.engine.attention == "fused-softmax" else ITEMSIZE["float32"]
        return np.where(held, 2.0 * each * self.job.batch.seq_len * cut(Dim("heads", op.heads), self.tp), 0.0)

    def _rows(self, op: Op, dim: Dim) -> Floats:
        """Elements a token of what `op` takes or returns in `dim`, all its passes together."""
        passes = (Dim("routed", int(op.passes)),) if op.passes > 1 else ()
        tiles = self.tiles if dim.name == "ffn" and is_tiled(self.job.model, op) else 1.0
        return self.numel((*passes, dim), at_home=not op.experts) / tiles

    def numel(self, dims: tuple[Dim, ...], *, at_home: bool = True) -> Floats:
        """Elements a token of a tensor with `dims`.

        A leading "routed" stands for a row for every expert that a token goes to. At the experts, the rows of all
        ranks that cut them meet; balanced, a rank has expert_tp / tp times as many as tokens are routed.
        """
        found, inside = np.ones_like(self.tp), False
        routed = bool(dims) and dims[0].name == "routed"
        for dim in dims:
            is_cut = AXIS.get(dim.name) == "tp"
            found = found * (cut(dim, self.tp) if is_cut else dim.size)
            inside = inside or is_cut
        if inside:
            return found
        if routed:
            return found * (1.0 if at_home else self.expert_tp) / self.tp
        return found / self.outside
