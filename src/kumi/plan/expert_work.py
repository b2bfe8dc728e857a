"""What it costs a rank to bring tokens to their experts, and back."""

from __future__ import annotations

import numpy as np

from kumi.plan.columns import Floats
from kumi.plan.comm import collective_seconds
from kumi.plan.cost import Cost, Rows
from kumi.spec.ledger import Op

# What bringing tokens to experts, or back, moves besides the exchange, in elements of them: sorted, padded, weighted,
# counted; the host waits for the counts, and starts so many kernels. Fitted to Megatron-Bridge's tables.
EXCHANGE = (6.5, 6.5, 75, 75)


def exchange(rows: Rows, cost: Cost, op: Op) -> None:
    """Every token goes to its experts, after word of how many come, or comes back: an all-to-all among the ranks
    that share the experts."""
    size = rows.size * rows.tokens * op.passes * rows.job.model.hidden_size / np.where(rows.parallel, rows.tp, 1.0)
    copies = round(op.passes) if rows.engine.tokens_once else 1
    seconds = rows.among_experts(size * rows.expert_tp, copies)
    counts = rows.among_experts(np.full_like(rows.tp, 8.0 * rows.experts), 1) if op.kind == "dispatch" else 0.0
    cost.comm_forward["ep"] += seconds + counts
    cost.comm_again["ep"] += seconds + counts
    cost.comm_backward["ep"] += seconds
    _expert_parts(rows, cost, op, size)
    rows.passes(cost, EXCHANGE, size / rows.size)


def _expert_parts(rows: Rows, cost: Cost, op: Op, size: Floats) -> None:
    """Where experts are cut, their ranks gather each other's tokens, weights and choices before (dispatch), and
    divide the sums after (combine)."""
    parts, sent = rows.expert_tp, size / rows.size / rows.job.model.hidden_size
    hidden, weights, choices = (each * sent * parts for each in (size / sent / op.passes, max(4, rows.size), 8.0))

    def seconds(bytes_: Floats) -> Floats:
        return collective_seconds(rows.job.cluster, "all_gather", bytes_, parts, np.ones_like(parts))

    if op.kind == "dispatch":
        both = seconds(hidden) + seconds(weights)
        cost.comm_forward["ep"] += both + seconds(choices)
        cost.comm_again["ep"] += both + seconds(choices)
        cost.comm_backward["ep"] += both
    else:
        cost.comm_forward["ep"] += seconds(hidden)
        cost.comm_backward["ep"] += seconds(hidden)
