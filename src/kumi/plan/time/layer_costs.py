"""What one microbatch costs a rank in one layer of each kind, in the embedding and in the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kumi.plan.layout_batch import Columns, Floats, Ints
from kumi.plan.time.attention_costs import attention, products, scan
from kumi.plan.time.expert_costs import exchange
from kumi.plan.time.kernel_times import matmul_seconds, stream_seconds
from kumi.plan.time.layer_collectives import (
    TIME_KIND,
    Message,
    embedding_messages,
    head_messages,
    layer_messages,
    message_seconds,
)
from kumi.plan.time.op_costs import COLLECTIVE_LAUNCHES, PASSES, Cost, Rows
from kumi.plan.unique_rows import distinct
from kumi.spec.job import Job
from kumi.spec.ledger import Op, embedding_ops, head_ops, kind_ops

# What decides a layer's cost on a rank; layouts that agree in these share one row of the table.
KEYS = ("tp", "cp", "ep", "expert_tp", "microbatch", "sequence_parallel", "context")

ROUNDED = ("float8", "float4")

# Bytes moved for an element on its way into a product in float8 or float4: it is read in two bytes and written rounded;
# what is transposed for the backward pass besides is mostly part of other kernels.
ROUNDING_BYTES = 3.0

# Speed of many small products, one for each expert, relative to one large one on a GPU. Fitted to Megatron-Bridge's
# tables.
GROUPED = 0.75

# Bytes held for a logit from which on some of them are a float32 copy.
FLOAT_LOGITS = 8.0

# Where what is sent in each phase is added up.
PHASES = {
    "forward": "comm_forward",
    "backward": "comm_backward",
    "recompute": "comm_again",
    "selective": "comm_selective",
}

# Share of tensor-parallel traffic that pipelined products hide, where the trainer overlaps them.
TP_HIDDEN = 0.6


@dataclass(frozen=True)
class Table:
    """`Cost` of each distinct combination of `KEYS`: of every kind of layer, of the embedding and of the head."""

    layers: tuple[Cost, ...]
    embedding: Cost
    head: Cost


def table(job: Job, x: Columns) -> tuple[Table, Ints]:
    """The costs of all combinations in `x`, and for every row of `x` its row in them."""
    first, index = distinct(*(getattr(x, name) for name in KEYS))
    rows = _Work(job, x.take(first))
    layers = tuple(rows.total(ops, layer_messages(rows, ops)) for ops in kind_ops(job.model))
    head = head_ops(job.model)
    return Table(
        layers,
        rows.total(embedding_ops(job.model), embedding_messages(rows, job.model.hidden_size)),
        rows.total(head, head_messages(rows, head[-1])),
    ), index


def fused(ops: Iterable[Op]) -> list[Op]:
    """`ops` with linears that read the same input, one after another, joined to one: query, key and value, or the two
    halves of a gated layer."""
    found: list[Op] = []
    for op in ops:
        last = found[-1] if found else None
        if last and op.kind == last.kind == "linear" and op.source == last.source and op.experts == last.experts:
            target = replace(last.target, size=last.target.size + op.target.size)
            found[-1] = replace(last, target=target, params=last.params + op.params)
        else:
            found.append(op)
    return found


class _Work(Rows):
    """What each op of the rows costs."""

    def total(self, ops: Sequence[Op], messages: Iterable[Message]) -> Cost:
        """The cost of `ops` and their `messages` together."""
        cost = Cost.zero(len(self.tp))
        for op in fused(ops) if self.engine.kernels == "fused" else ops:
            self._add(cost, op)
        self._communicate(cost, messages)
        return cost

    def _add(self, cost: Cost, op: Op) -> None:
        if op.kind in ("linear", "router"):
            self._linear(cost, op)
        elif op.kind == "lora":
            self._adapter(cost, op)
        elif op.kind == "attention":
            attention(self, cost, op)
        elif op.kind == "log_prob":
            self._head(cost, op)
        elif op.kind in ("dispatch", "combine"):
            exchange(self, cost, op)
        elif op.kind == "embedding":
            self._embedding(cost, op)
        elif op.kind == "scan":
            scan(self, cost, op)
        elif op.kind in PASSES:
            self.elements(cost, op.kind, self.elements_of(op))
            if op.kind == "convolution":
                products(self, cost, op)

    def matmul_dtype(self, op: Op) -> str:
        return self.job.precision.matmul_dtype if op.kind == "linear" else self.job.precision.compute

    def _linear(self, cost: Cost, op: Op) -> None:
        """A product forward and two backward; an expert's rows are its share of the tokens."""
        weight_columns = np.ceil(op.target.size / self.cut(op.target.name, op))
        inner = np.ceil(op.source.size / self.cut(op.source.name, op))
        rows, dtype, repeats = self.rows_of(op), self.matmul_dtype(op), np.ones_like(self.tp)
        if op.experts:
            # The tokens of all ranks that share the experts meet; each expert gets an equal part.
            repeats = op.experts / self.ep
            rows = rows / repeats
        shapes = ((rows, inner, weight_columns), (rows, weight_columns, inner), (weight_columns, rows, inner))
        slower = GROUPED if op.experts and self.gpu else 1.0
        one = [matmul_seconds(self.device, dtype, *shape) / slower for shape in shapes]
        cost.forward += repeats * one[0]
        cost.backward += repeats * one[1]
        cost.kernels_forward += 1
        cost.kernels_backward += 1
        if op.frozen:
            self._unpack(cost, op, inner * weight_columns)
            return
        cost.weight += repeats * one[2]
        cost.weight += stream_seconds(self.device, 2 * self.engine.grad_itemsize * repeats * inner * weight_columns)
        cost.kernels_backward += 1
        if len(op.params) > 1:
            # The gradient of a bias is summed over the rows.
            cost.weight += stream_seconds(self.device, self.size * rows * repeats * weight_columns)
            cost.kernels_backward += 1
            if op.experts:
                # Products of experts leave the bias to a kernel of its own.
                cost.forward += stream_seconds(self.device, 2 * self.size * rows * repeats * weight_columns)
                cost.kernels_forward += 1
        entering, leaving = rows * repeats * inner, rows * repeats * weight_columns
        self._casts(cost, op, entering, leaving, repeats * inner * weight_columns)

    def _unpack(self, cost: Cost, op: Op, elements: Floats) -> None:
        """What is kept in few bits is unpacked in the forward and again in the backward pass."""
        if op.params[0].quantized:
            packed = self.job.precision.itemsize(quantized=op.params[0].quantized)
            seconds = stream_seconds(self.device, (packed + self.size) * elements)
            cost.forward += seconds
            cost.backward += seconds
            cost.kernels_forward += 1
            cost.kernels_backward += 1

    def _adapter(self, cost: Cost, op: Op) -> None:
        """Two thin products, and what they give added to what the matrix does, in DoRA multiplied besides."""
        a, b, *more = op.params
        for source, target, param in ((op.source, a.dims[0], a), (b.dims[1], op.target, b)):
            self._linear(cost, Op(param.name, "linear", source, target, (param,)))
        leaving = self.rows_of(op) * np.ceil(op.target.size / self.cut(op.target.name, op))
        for kind in ("add", *(["gate"] if more else [])):
            self.elements(cost, kind, leaving)

    def _casts(self, cost: Cost, op: Op, entering: Floats, leaving: Floats, weights: Floats) -> None:
        """Products in float8 and float4 read rounded copies, of the gradient that comes back, too; float32 weights are
        cast where they are used."""
        if self.matmul_dtype(op) in ROUNDED:
            cost.forward += stream_seconds(self.device, ROUNDING_BYTES * entering)
            cost.backward += stream_seconds(self.device, ROUNDING_BYTES * leaving)
            cost.kernels_forward += 1
            cost.kernels_backward += 1
        if not self.engine.half_weights and self.job.precision.compute != self.job.precision.param:
            cost.forward += stream_seconds(self.device, 6.0 * weights)
            cost.kernels_forward += 1

    def _embedding(self, cost: Cost, op: Op) -> None:
        """A gather forward; backward a sum into a table of gradients that is written whole."""
        elements = self.tokens * op.target.size
        cost.forward += stream_seconds(self.device, 2 * self.size * elements)
        table = self.engine.grad_itemsize * np.ceil(op.source.size / self.tp) * op.target.size
        cost.kernels_forward += 2
        if not op.frozen:
            cost.weight += stream_seconds(self.device, 3 * self.size * elements + 2 * table)
            cost.kernels_backward += 4
        if self.engine.dropout:
            self.elements(cost, "dropout", elements)

    def _head(self, cost: Cost, op: Op) -> None:
        columns = np.ceil(op.target.size / self.tp)
        shapes = (
            (self.tokens, op.source.size, columns),
            (self.tokens, columns, op.source.size),
            (columns, self.tokens, op.source.size),
        )
        one = [matmul_seconds(self.device, self.job.precision.compute, *map(np.asarray, shape)) for shape in shapes]
        cost.forward += one[0]
        cost.backward += one[1]
        cost.weight += one[2] * (not op.frozen)
        cost.kernels_forward += 1
        cost.kernels_backward += 2
        # A loss that keeps float32 copies of the logits makes them one operation after another.
        how = "eager" if self.engine.logit_bytes >= FLOAT_LOGITS else self.engine.kernels
        self.passes(cost, PASSES["logits"][how], self.tokens * columns)

    def _communicate(self, cost: Cost, messages: Iterable[Message]) -> None:
        """Adds what nothing hides of `messages`, by axis, and what the host does for them."""
        seconds: dict[tuple[str, str, str], Floats] = {}
        calls = np.where(self.tp > 1, COLLECTIVE_LAUNCHES, 0.0)
        for message in messages:
            each = message_seconds(self.job, self.layouts, message)
            for phase, count in message.counts.items():
                key = phase, TIME_KIND[message.group], message.behind
                seconds[key] = seconds.get(key, 0.0) + count * each
            if message.group == "tp":
                cost.kernels_forward += calls * message.counts.get("forward", 0)
                cost.kernels_backward += calls * message.counts.get("backward", 0)
        for (phase, axis, behind), sent in seconds.items():
            comm: dict[str, Floats] = getattr(cost, PHASES[phase])
            comm[axis] = comm.get(axis, 0.0) + self._exposed(cost, sent, phase, behind)

    def _exposed(self, cost: Cost, sent: Floats, phase: str, behind: str) -> Floats:
        """What of `sent` seconds the computation `behind` them does not hide."""
        if behind == "products":
            compute = cost.backward if phase == "backward" else cost.forward
            return sent - np.minimum(TP_HIDDEN * sent, 0.5 * compute)
        if behind == "attention":
            # The part of the attention that reads the keys and values of other ranks.
            compute = cost.attention * (1 - 1 / self.cp) * (2.5 if phase == "backward" else 1.0)
            return np.maximum(0.0, sent - compute)
        return sent
