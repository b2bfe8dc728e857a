"""The cost of a microbatch on a rank, and the sizes that the cost of every operation depends on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.plan.time.kernel_times import stream_seconds
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT
from kumi.spec.ledger import Op

# Memory traffic and kernels of elementwise operations, as (elements read or written per element in the forward pass, in
# the backward pass, kernels launched in the forward pass, in the backward pass), for the words of `Engine.kernels` and
# `Engine.loss_kernels`. Eager norms and rotations compute in float32. The figures of "fused-norms" are those of kumi's
# operators on a GPU, as tests/benchmarks/test_kernel_counts.py counts them; an addition includes the sums of gradients
# that its backward pass needs.
MEMORY_PASSES: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "norm": {"eager": (15, 24, 6, 12), "fused-norms": (2, 3, 1, 1), "fused": (2, 4, 1, 2), "compiled": (2, 4, 1, 2)},
    "rope": {"eager": (10, 10, 8, 8), "fused-norms": (16, 16, 10, 12), "fused": (2, 2, 1, 1), "compiled": (2, 2, 1, 1)},
    "gated_norm": {"eager": (20, 33, 8, 16), "fused": (3, 6, 1, 2), "compiled": (3, 6, 1, 2)},
    "convolution": {"eager": (24, 60, 10, 40), "fused": (2, 4, 1, 2), "compiled": (2, 4, 1, 2)},
    "gate": {"eager": (5, 9, 2, 4), "fused-norms": (5, 11, 2, 4), "fused": (3, 5, 1, 1), "compiled": (3, 5, 1, 1)},
    "activation": {"eager": (4, 6, 2, 2), "fused": (2, 3, 1, 1), "compiled": (2, 3, 1, 1)},
    "add": {"eager": (3, 2, 1, 1), "fused-norms": (3, 7.5, 1, 2.5), "fused": (3, 1, 1, 1), "compiled": (1, 1, 0, 0)},
    "dropout": {"eager": (2.5, 2.5, 1, 1), "fused": (1, 1, 0, 0), "compiled": (1, 1, 0, 0)},
    "logits": {"eager": (14, 10, 6, 4), "fused": (5, 4, 2, 2), "compiled": (5, 4, 2, 2), "triton": (3, 0, 2, 0)},
    "softmax": {"eager": (12, 8, 4, 3), "fused-softmax": (2, 3, 1, 1)},
}


def memory_passes(kind: str, kernels: str) -> tuple[float, float, float, float]:
    """Return the entry of `MEMORY_PASSES` for `kind`, op by op where `kernels` have none of their own for it."""
    by_kernels = MEMORY_PASSES[kind]
    return by_kernels["eager"] if kernels == "fused-norms" and kernels not in by_kernels else by_kernels[kernels]


# The axes whose communication a microbatch exposes.
_COMM_AXES = ("tp", "cp", "ep")


@dataclass
class MicrobatchCost:
    """Cost of one microbatch on a rank, (rows,) each.

    `forward`, `backward`, `weight`: compute seconds of the forward pass, input gradients and weight gradients.
    `kernels_forward`, `kernels_backward`: kernel launches.
    `attention`: the part of `forward` in attention, softmax included.
    `core`: the part of `forward` in fused attention kernels.
    `cheap`: the part of `forward` in elementwise operations and unfused attention.
    `comm_forward`, `comm_backward`: exposed communication seconds by axis.
    `comm_full`, `comm_selective`: exposed communication seconds by axis that full and selective recomputation repeat.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    kernels_forward: Floats
    kernels_backward: Floats
    attention: Floats
    core: Floats
    cheap: Floats
    comm_forward: dict[str, Floats]
    comm_backward: dict[str, Floats]
    comm_full: dict[str, Floats]
    comm_selective: dict[str, Floats]

    # The number of figures in all fields.
    FIGURES: ClassVar[int] = 8 + 4 * len(_COMM_AXES)

    @classmethod
    def zero(cls, rows: int) -> MicrobatchCost:
        """Return a cost of zero for `rows` rows."""
        empty = {field.name: np.zeros(rows) for field in fields(cls) if not field.name.startswith("comm")}
        forward, backward, full = ({axis: np.zeros(rows) for axis in _COMM_AXES} for _ in range(3))
        return cls(**empty, comm_forward=forward, comm_backward=backward, comm_full=full, comm_selective={})

    def figures(self, rows: int) -> Floats:
        """Return all figures as (FIGURES, rows)."""
        none, columns = np.zeros(rows), list[Floats]()
        for item in fields(self):
            value = getattr(self, item.name)
            columns += [value.get(axis, none) for axis in _COMM_AXES] if isinstance(value, dict) else [value]
        return np.stack(columns)

    @classmethod
    def from_figures(cls, figures: Floats) -> MicrobatchCost:
        """Return the cost with these `figures`."""
        column = iter(figures)
        values: dict[str, Any] = {
            item.name: {axis: next(column) for axis in _COMM_AXES} if item.name.startswith("comm") else next(column)
            for item in fields(cls)
        }
        return cls(**values)


class LayoutSizes:
    """Degrees of a batch of layouts as floats, and sizes of a microbatch on a rank, (rows,) each.

    `tokens`: tokens of a microbatch on a rank.
    `sequence_parallel`: True where tp ranks also shard activations along the sequence.
    `itemsize`: bytes per element in the compute dtype.
    `wide_itemsize`: bytes per element in float32, or in the compute dtype if that is wider.
    """

    def __init__(self, job: Job, layouts: LayoutBatch) -> None:
        self.job, self.device, self.engine, self.layouts = job, job.cluster.device, job.engine, layouts
        self.gpu = self.device.is_gpu
        self.tp, self.cp, self.ep = (degree.astype(np.float64) for degree in (layouts.tp, layouts.cp, layouts.ep))
        self.expert_tp = layouts.expert_tp.astype(np.float64)
        self.ulysses = layouts.context == CONTEXT.index("ulysses")
        self.sequence_parallel = layouts.sequence_parallel.astype(bool) & (layouts.tp > 1)
        self.tokens = layouts.microbatch * job.batch.seq_len / self.cp
        self.sequences = layouts.microbatch.astype(np.float64)
        self.itemsize, self.wide_itemsize = job.itemsize, max(4, job.itemsize)

    def shard_degree(self, dim_name: str, op: Op) -> Floats:
        """Return the number of ranks that shard the dim `dim_name` of `op`."""
        if dim_name not in ("heads", "kv_heads", "groups", "ffn", "vocab"):
            return np.ones_like(self.tp)
        return self.expert_tp if op.experts else self.tp

    def op_tokens(self, op: Op) -> Floats:
        """Return the tokens that pass through `op` on a rank.

        A token passes through `op.passes` experts. An expert sharded over expert_tp gets the tokens of all its ranks.
        """
        return self.tokens * op.passes * (self.expert_tp / self.tp if op.experts else 1.0)

    def output_elements(self, op: Op) -> Floats:
        """Return the elements of the output of `op` on a rank.

        Between tensor-parallel matmuls activations are sharded only under sequence parallelism.
        """
        degree = np.where(self.sequence_parallel, self.tp, 1.0)
        if op.target.name in ("heads", "kv_heads", "groups", "ffn"):
            degree = self.shard_degree(op.target.name, op)
        keys = op.kv_size / 2 if op.kind == "rope" else 0
        return self.op_tokens(op) * (op.target.size + keys) / degree

    def add_elementwise(self, cost: MicrobatchCost, kind: str, elements: Floats) -> None:
        """Add to `cost` an elementwise operation of `kind` with the engine's kernels."""
        kernels = "fused" if kind == "rope" and self.engine.fused_rotation else self.engine.kernels
        self.add_passes(cost, memory_passes(kind, kernels), elements)

    def add_passes(self, cost: MicrobatchCost, passes: tuple[float, float, float, float], elements: Floats) -> None:
        """Add to `cost` the memory traffic and kernels of `passes` (see `MEMORY_PASSES`) over `elements`."""
        forward, backward, kernels_forward, kernels_backward = passes
        seconds = stream_seconds(self.device, forward * self.itemsize * elements)
        cost.forward += seconds
        cost.cheap += seconds
        cost.backward += stream_seconds(self.device, backward * self.itemsize * elements)
        cost.kernels_forward += kernels_forward
        cost.kernels_backward += kernels_backward
