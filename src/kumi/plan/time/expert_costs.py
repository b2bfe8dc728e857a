"""What it costs a rank to bring tokens to their experts, and back."""

from __future__ import annotations

import numpy as np

from kumi.plan.time.op_costs import Cost, Rows
from kumi.spec.ledger import Op

# What bringing tokens to experts, or back, moves besides the exchange, in elements of them: sorted, padded, weighted,
# counted; the host waits for the counts, and starts so many kernels. Fitted to Megatron-Bridge's tables.
EXCHANGE = (6.5, 6.5, 75, 75)


def exchange(rows: Rows, cost: Cost, op: Op) -> None:
    """Around the messages (`kumi.plan.time.layer_collectives`), on the way there (dispatch) as on the way back
    (combine)."""
    tokens = rows.tokens * op.passes / np.where(rows.parallel, rows.tp, 1.0)
    rows.passes(cost, EXCHANGE, tokens * rows.job.model.hidden_size)
