"""Cost of dispatching tokens to experts and combining the results, without communication."""

from __future__ import annotations

import numpy as np

from kumi.plan.time.op_costs import LayoutSizes, MicrobatchCost
from kumi.spec.ledger import Op

# Memory passes over the tokens and kernel launches of a dispatch or a combine, as in `op_costs.MEMORY_PASSES`: tokens
# are counted, sorted, padded and weighted, and the host waits for the counts. Fitted to Megatron-Bridge's tables.
_EXCHANGE_PASSES = (6.5, 6.5, 75, 75)
# The same of kumi on a GPU, by `Engine.expert_kernels`, counted (tests/benchmarks/test_kernel_counts.py).
_COUNTED_PASSES = {"eager": (5.6, 12.9, 20.5, 48), "triton": (1.4, 3.2, 8.5, 12.5)}


def add_token_exchange(sizes: LayoutSizes, cost: MicrobatchCost, op: Op) -> None:
    """Add the cost of a dispatch or combine `op` to `cost`, without its collectives."""
    tokens = sizes.tokens * op.passes / np.where(sizes.sequence_parallel, sizes.tp, 1.0)
    sizes.add_passes(
        cost, _COUNTED_PASSES.get(sizes.engine.expert_kernels, _EXCHANGE_PASSES), tokens * sizes.job.model.hidden_size
    )
