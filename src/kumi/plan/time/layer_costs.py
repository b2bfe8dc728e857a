"""Cost of a microbatch on a rank: of one layer of each kind, of the embedding and of the head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import CHOICES, Floats, Ints, LayoutBatch
from kumi.plan.row_cache import RowCache
from kumi.plan.time.attention_costs import add_attention, add_scan, add_scan_matmuls
from kumi.plan.time.expert_costs import add_token_exchange
from kumi.plan.time.kernel_times import matmul_seconds, stream_seconds
from kumi.plan.time.layer_collectives import (
    TIME_KIND,
    CollectiveBatch,
    embedding_collectives,
    head_collectives,
    layer_collectives,
    seconds_each,
)
from kumi.plan.time.op_costs import MEMORY_PASSES, LayoutSizes, MicrobatchCost, memory_passes
from kumi.plan.unique_rows import unique_rows
from kumi.spec.job import Job
from kumi.spec.ledger import Op, embedding_ops, head_ops, logit_chunk, unique_layer_ops
from kumi.spec.loss_passes import keeps_chunk
from kumi.spec.schedule import is_pipelined

# The fields of a layout that determine a layer's cost on a rank: layouts that agree in these share a row of the table.
_COST_FIELDS = ("tp", "cp", "ep", "expert_tp", "microbatch", "sequence_parallel", "context")
# Further ones on a CPU, whose head depends on them (see `kumi.spec.loss_passes.keeps_chunk`).
_CPU_COST_FIELDS = ("pp", "schedule")

# Dtypes whose matmuls read rounded copies of their operands.
_ROUNDED_DTYPES = ("float8", "float4")

# Bytes of memory traffic to round one element for a float8 or float4 matmul: two bytes are read, and the rounded
# element is written. The transposed copies for the backward pass are mostly part of other kernels.
_ROUNDING_BYTES = 3.0

# Speed of a grouped matmul over experts relative to one large matmul on a GPU. Fitted to Megatron-Bridge's tables.
_GROUPED_MATMUL_SPEED = 0.75

# Launch intervals that the host spends on a collective: bookkeeping of the library, and kernels that rearrange data.
_COLLECTIVE_LAUNCHES = 4.4

# The fields of `MicrobatchCost` that sum the exposed communication of each phase.
_COMM_FIELDS = {
    "forward": "comm_forward",
    "backward": "comm_backward",
    "recompute": "comm_full",
    "selective": "comm_selective",
}

# Share of tensor-parallel communication that matmuls hide, if the trainer overlaps them.
_TP_OVERLAP = 0.6


class CostTable(NamedTuple):
    """Costs of a microbatch for each distinct combination of its fields: per kind of layer, embedding, and head."""

    layers: tuple[MicrobatchCost, ...]
    embedding: MicrobatchCost
    head: MicrobatchCost


def cost_table(job: Job, layouts: LayoutBatch, cache: RowCache | None = None) -> tuple[CostTable, Ints]:
    """Return the costs for the distinct combinations of `_COST_FIELDS`, and the row of each layout in them, (rows,).

    On a CPU, the combinations include `_CPU_COST_FIELDS`.
    `cache`: costs of the same job that were computed before.
    """
    names = (*_COST_FIELDS, *(_CPU_COST_FIELDS if job.cluster.device.kind == "cpu" else ()))
    first, index = unique_rows(*(getattr(layouts, name) for name in names))
    unique = layouts.take(first)
    if cache is None:
        return _cost_table(job, unique), index
    fields = [getattr(unique, name) for name in names]
    figures = cache.figures(fields, lambda rows: _figures_of(_cost_table(job, unique.take(rows)), len(rows)))
    costs = [MicrobatchCost.from_figures(part) for part in figures.reshape(-1, MicrobatchCost.FIGURES, len(first))]
    return CostTable(tuple(costs[:-2]), *costs[-2:]), index


def _figures_of(table: CostTable, rows: int) -> Floats:
    """Return all costs of `table` as (figures, rows)."""
    return np.concatenate([cost.figures(rows) for cost in (*table.layers, table.embedding, table.head)])


def _cost_table(job: Job, layouts: LayoutBatch) -> CostTable:
    """Return the costs of every row."""
    costs, head = _OpCosts(job, layouts), head_ops(job.model)
    return CostTable(
        layers=tuple(costs.total(ops, layer_collectives(costs, ops)) for ops in unique_layer_ops(job.model)),
        embedding=costs.total(embedding_ops(job.model), embedding_collectives(costs, job.model.hidden_size)),
        head=costs.total(head, head_collectives(costs, head[-1])),
    )


def _fuse_linears(ops: Iterable[Op]) -> list[Op]:
    """Return `ops` with consecutive linears of the same input merged: q, k and v, or gate and up projection."""
    merged: list[Op] = []
    for op in ops:
        last = merged[-1] if merged else None
        if last and op.kind == last.kind == "linear" and op.source == last.source and op.experts == last.experts:
            target = replace(last.target, size=last.target.size + op.target.size)
            merged[-1] = replace(last, target=target, params=last.params + op.params)
        else:
            merged.append(op)
    return merged


class _OpCosts(LayoutSizes):
    """Costs of operations, (rows,) each."""

    def total(self, ops: Sequence[Op], collectives: Iterable[CollectiveBatch]) -> MicrobatchCost:
        """Return the cost of `ops` and their collectives."""
        cost = MicrobatchCost.zero(len(self.tp))
        for op in _fuse_linears(ops) if self.engine.kernels == "fused" else ops:
            self._add(cost, op)
        self._add_communication(cost, collectives)
        return cost

    def _add(self, cost: MicrobatchCost, op: Op) -> None:
        """Add the cost of `op` to `cost`."""
        if op.kind in ("linear", "router", "score"):
            self._add_linear(cost, op)
        elif op.kind == "lora":
            self._add_adapter(cost, op)
        elif op.kind == "attention":
            add_attention(self, cost, op)
        elif op.kind == "log_prob":
            self._add_head(cost, op)
        elif op.kind in ("dispatch", "combine"):
            add_token_exchange(self, cost, op)
        elif op.kind == "embedding":
            self._add_embedding(cost, op)
        elif op.kind == "scan":
            add_scan(self, cost, op)
        elif op.kind in MEMORY_PASSES:
            self.add_elementwise(cost, op.kind, self.output_elements(op))
            if op.kind == "convolution":
                add_scan_matmuls(self, cost, op)

    def _matmul_dtype(self, op: Op) -> str:
        """Return the dtype in which the matmul of `op` runs."""
        return self.job.precision.matmul_dtype if op.kind == "linear" else self.job.precision.compute

    def _add_linear(self, cost: MicrobatchCost, op: Op) -> None:
        """Add the matmuls of a linear layer: one forward, two backward. Tokens are balanced over experts."""
        weight_columns = np.ceil(op.target.size / self.shard_degree(op.target.name, op))
        inner = np.ceil(op.source.size / self.shard_degree(op.source.name, op))
        rows, dtype, repeats = self.op_tokens(op), self._matmul_dtype(op), np.ones_like(self.tp)
        if op.experts:
            # An expert's rank has tokens of all ep ranks; each expert gets an equal part.
            repeats = op.experts / self.ep
            rows = rows / repeats
        shapes = ((rows, inner, weight_columns), (rows, weight_columns, inner), (weight_columns, rows, inner))
        speed = _GROUPED_MATMUL_SPEED if op.experts and self.gpu else 1.0
        forward, backward, weight = (matmul_seconds(self.device, dtype, *shape) / speed for shape in shapes)
        cost.forward += repeats * forward
        cost.backward += repeats * backward
        cost.kernels_forward += 1
        cost.kernels_backward += 1
        if op.frozen:
            self._add_unpacking(cost, op, inner * weight_columns)
            return
        cost.weight += repeats * weight
        cost.weight += stream_seconds(self.device, 2 * self.engine.grad_itemsize * repeats * inner * weight_columns)
        cost.kernels_backward += 1
        if len(op.params) > 1:
            # The gradient of a bias is a sum over rows.
            cost.weight += stream_seconds(self.device, self.itemsize * rows * repeats * weight_columns)
            cost.kernels_backward += 1
            if op.experts:
                # Grouped matmuls add the bias in a separate kernel.
                cost.forward += stream_seconds(self.device, 2 * self.itemsize * rows * repeats * weight_columns)
                cost.kernels_forward += 1
        inputs, outputs = rows * repeats * inner, rows * repeats * weight_columns
        self._add_casts(cost, op, inputs, outputs, repeats * inner * weight_columns)

    def _add_unpacking(self, cost: MicrobatchCost, op: Op, elements: Floats) -> None:
        """Add the unpacking of `elements` of a quantized weight, once in the forward and once in the backward pass."""
        if op.params[0].quantized:
            packed = self.job.precision.itemsize(quantized=op.params[0].quantized)
            seconds = stream_seconds(self.device, (packed + self.itemsize) * elements)
            cost.forward += seconds
            cost.backward += seconds
            cost.kernels_forward += 1
            cost.kernels_backward += 1

    def _add_adapter(self, cost: MicrobatchCost, op: Op) -> None:
        """Add an adapter: two low-rank matmuls, the addition to the matrix's output, and in DoRA a scaling."""
        a, b, *more = op.params
        for source, target, param in ((op.source, b.dims[-1], a), (b.dims[-1], op.target, b)):
            product = Op(param.name, "linear", source, target, (param,), passes=op.passes, experts=op.experts)
            self._add_linear(cost, product)
        outputs = self.op_tokens(op) * np.ceil(op.target.size / self.shard_degree(op.target.name, op))
        for kind in ("add", *(["gate"] if more else [])):
            self.add_elementwise(cost, kind, outputs)

    def _add_casts(self, cost: MicrobatchCost, op: Op, inputs: Floats, outputs: Floats, weights: Floats) -> None:
        """Add the casts of a matmul's operands; `inputs`, `outputs` and `weights` are numbers of elements.

        Float8 and float4 matmuls read rounded copies of the input and the output gradient. Float32 weights are cast to
        the compute dtype.
        """
        if self._matmul_dtype(op) in _ROUNDED_DTYPES:
            cost.forward += stream_seconds(self.device, _ROUNDING_BYTES * inputs)
            cost.backward += stream_seconds(self.device, _ROUNDING_BYTES * outputs)
            cost.kernels_forward += 1
            cost.kernels_backward += 1
        if not self.engine.half_weights and self.job.precision.compute != self.job.precision.param:
            cost.forward += stream_seconds(self.device, 6.0 * weights)
            cost.kernels_forward += 1

    def _add_embedding(self, cost: MicrobatchCost, op: Op) -> None:
        """Add the embedding: a lookup in the forward pass; the backward pass writes the full table of gradients."""
        elements = self.tokens * op.target.size
        cost.forward += stream_seconds(self.device, 2 * self.itemsize * elements)
        table = self.engine.grad_itemsize * np.ceil(op.source.size / self.tp) * op.target.size
        cost.kernels_forward += 2
        if not op.frozen:
            cost.weight += stream_seconds(self.device, 3 * self.itemsize * elements + 2 * table)
            cost.kernels_backward += 4
        if self.engine.dropout:
            self.add_elementwise(cost, "dropout", elements)

    def _add_head(self, cost: MicrobatchCost, op: Op) -> None:
        """Add the head's three matmuls and the loss, and the first matmul again where the backward pass repeats it."""
        columns = np.ceil(op.target.size / self.tp)
        shapes = (
            (self.tokens, op.source.size, columns),
            (self.tokens, columns, op.source.size),
            (columns, self.tokens, op.source.size),
        )
        dtype = self.job.precision.compute
        forward, backward, weight = (matmul_seconds(self.device, dtype, *map(np.asarray, shape)) for shape in shapes)
        cost.forward += forward
        again = self._head_again(columns)
        cost.backward += backward + forward * again
        cost.weight += weight * (not op.frozen)
        cost.kernels_forward += 1
        cost.kernels_backward += 2 + again
        self.add_passes(cost, memory_passes("logits", self.engine.loss_kernels), self.tokens * columns)

    def _head_again(self, columns: Floats) -> Floats:
        """Return 1 where the backward pass computes the head's first matmul again, else 0.

        `columns`: the columns of its output on a rank.
        """
        again = np.full_like(self.tp, self.job.passes.head_again)
        if self.device.kind == "cpu" and self.job.passes.head_again:
            for row, (pp, schedule) in enumerate(zip(self.layouts.pp, self.layouts.schedule, strict=True)):
                pipelined = is_pipelined(int(pp), CHOICES["schedule"][schedule])
                tokens, chunk = int(self.tokens[row]), logit_chunk(int(columns[row]), self.device.kind)
                again[row] = not keeps_chunk(tokens, chunk, self.device.kind, pipelined=pipelined)
        return again

    def _add_communication(self, cost: MicrobatchCost, collectives: Iterable[CollectiveBatch]) -> None:
        """Add the exposed seconds of `collectives` by axis, and their launches. `cost` must have all compute before."""
        seconds: dict[tuple[str, str, str], Floats] = {}
        launches = np.where(self.tp > 1, _COLLECTIVE_LAUNCHES, 0.0)
        for collective in collectives:
            each = seconds_each(self.job, self.layouts, collective)
            for phase, count in collective.counts.items():
                key = phase, TIME_KIND[collective.group], collective.hidden_by
                seconds[key] = seconds.get(key, 0.0) + count * each
            if collective.group == "tp":
                cost.kernels_forward += launches * collective.counts.get("forward", 0)
                cost.kernels_backward += launches * collective.counts.get("backward", 0)
        for (phase, axis, hidden_by), total in seconds.items():
            comm: dict[str, Floats] = getattr(cost, _COMM_FIELDS[phase])
            comm[axis] = comm.get(axis, 0.0) + self._exposed_seconds(cost, total, phase, hidden_by)

    def _exposed_seconds(self, cost: MicrobatchCost, seconds: Floats, phase: str, hidden_by: str) -> Floats:
        """Return the part of `seconds` of communication that the computation `hidden_by` does not hide."""
        if hidden_by == "matmuls":
            compute = cost.backward if phase == "backward" else cost.forward
            return seconds - np.minimum(_TP_OVERLAP * seconds, 0.5 * compute)
        if hidden_by == "attention":
            # Attention over the keys and values of other ranks.
            compute = cost.attention * (1 - 1 / self.cp) * (2.5 if phase == "backward" else 1.0)
            return np.maximum(0.0, seconds - compute)
        return seconds
