"""What one microbatch costs a rank in one part of a model, and what every kind of work needs to say so."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from kumi.plan.layout_batch import Columns, Floats
from kumi.plan.time.kernel_times import stream_seconds
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT
from kumi.spec.ledger import Op

# Passes over an op's elements going forward and backward, in elements read or written, and kernels launched, for
# kernels that run op by op ("eager"), fused by hand and compiled. Eager norms and rotations compute in float32.
PASSES: dict[str, dict[str, tuple[float, float, int, int]]] = {
    "norm": {"eager": (15, 24, 6, 12), "fused": (2, 4, 1, 2), "compiled": (2, 4, 1, 2)},
    "rope": {"eager": (10, 10, 8, 8), "fused": (2, 2, 1, 1), "compiled": (2, 2, 1, 1)},
    "gated_norm": {"eager": (20, 33, 8, 16), "fused": (3, 6, 1, 2), "compiled": (3, 6, 1, 2)},
    "convolution": {"eager": (24, 60, 10, 40), "fused": (2, 4, 1, 2), "compiled": (2, 4, 1, 2)},
    "gate": {"eager": (5, 9, 2, 4), "fused": (3, 5, 1, 1), "compiled": (3, 5, 1, 1)},
    "activation": {"eager": (4, 6, 2, 2), "fused": (2, 3, 1, 1), "compiled": (2, 3, 1, 1)},
    "add": {"eager": (3, 2, 1, 1), "fused": (3, 1, 1, 1), "compiled": (1, 1, 0, 0)},
    "dropout": {"eager": (2.5, 2.5, 1, 1), "fused": (1, 1, 0, 0), "compiled": (1, 1, 0, 0)},
    "logits": {"eager": (14, 10, 6, 4), "fused": (5, 4, 2, 2), "compiled": (5, 4, 2, 2)},
    "softmax": {"eager": (12, 8, 4, 3), "fused-softmax": (2, 3, 1, 1)},
}

# Launch intervals that the host spends on a collective: the library's own bookkeeping, and the rearranging around it.
COLLECTIVE_LAUNCHES = 4.4


@dataclass
class Cost:
    """What a rank spends on one microbatch, (rows,) each.

    Seconds of computing forward, for the input gradients and for the weight gradients; kernels launched; the parts of
    the forward that attention takes (its softmax included), that fused attention takes ("core") and that cheap,
    element-wise work and unfused attention take; communication that nothing hides, by axis: of the forward, of the
    backward, and what a forward sends again that is recomputed whole, or selectively.
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
    comm_again: dict[str, Floats]
    comm_selective: dict[str, Floats]

    @classmethod
    def zero(cls, rows: int) -> Cost:
        empty = {one.name: np.zeros(rows) for one in fields(cls) if not one.name.startswith("comm")}
        forward, backward, again = ({axis: np.zeros(rows) for axis in ("tp", "cp", "ep")} for _ in range(3))
        return cls(**empty, comm_forward=forward, comm_backward=backward, comm_again=again, comm_selective={})


class Rows:
    """The distinct rows of a table, as floats, with what every op needs of them."""

    def __init__(self, job: Job, x: Columns) -> None:
        self.job, self.device, self.engine, self.layouts = job, job.cluster.device, job.engine, x
        self.gpu = self.device.kind == "cuda"
        self.tp, self.cp, self.ep = (column.astype(np.float64) for column in (x.tp, x.cp, x.ep))
        self.expert_tp = x.expert_tp.astype(np.float64)
        self.ulysses = x.context == CONTEXT.index("ulysses")
        self.parallel = x.sequence_parallel.astype(bool) & (x.tp > 1)
        self.tokens = x.microbatch * job.batch.seq_len / self.cp
        self.sequences = x.microbatch.astype(np.float64)
        self.size, self.wide = job.itemsize, max(4, job.itemsize)

    def cut(self, dim_name: str, op: Op) -> Floats:
        """How many ranks share `dim_name` of `op` among them."""
        if dim_name not in ("heads", "kv_heads", "groups", "ffn", "vocab"):
            return np.ones_like(self.tp)
        return self.expert_tp if op.experts else self.tp

    def rows_of(self, op: Op) -> Floats:
        """Tokens that pass through `op` on a rank. Experts see those of a rank's share of the sequence, `top_k` times,
        and where experts are cut themselves, those of all ranks that hold a part."""
        return self.tokens * op.passes * (self.expert_tp / self.tp if op.experts else 1.0)

    def elements_of(self, op: Op) -> Floats:
        """Elements of what `op` returns on a rank; between the tensor-parallel regions divided only under SP."""
        cut = np.where(self.parallel, self.tp, 1.0)
        if op.target.name in ("heads", "kv_heads", "groups", "ffn"):
            cut = self.cut(op.target.name, op)
        extra = op.kv_size / 2 if op.kind == "rope" else 0
        return self.rows_of(op) * (op.target.size + extra) / cut

    def elements(self, cost: Cost, kind: str, elements: Floats) -> None:
        self.passes(cost, PASSES[kind][self.engine.kernels], elements)

    def passes(self, cost: Cost, passes: tuple[float, float, int, int], elements: Floats) -> None:
        forward, backward, kernels_forward, kernels_backward = passes
        seconds = stream_seconds(self.device, forward * self.size * elements)
        cost.forward += seconds
        cost.cheap += seconds
        cost.backward += stream_seconds(self.device, backward * self.size * elements)
        cost.kernels_forward += kernels_forward
        cost.kernels_backward += kernels_backward
