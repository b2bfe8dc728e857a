"""Training without devices: one rank's real program over tensors without content, beside what the planner says of it.

found = dry_run(job, layout, [rank])    # plain data: memory by kind, FLOPs, messages, measured and planned
show(render(found))
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kumi.errors import LayoutError
from kumi.spec.checks import problems
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.trainable import untrainable

if TYPE_CHECKING:
    from kumi.plan.types import Estimate


def dry_run(job: Job, layout: Layout, ranks: Sequence[int]) -> dict[str, Any]:
    """What each of `ranks` holds, computes and sends in a step, as plain data (see `kumi.dryrun.compare`).

    Raises LayoutError where `layout` is illegal, or not one that this version trains.
    """
    wrong = problems(job.model, layout, job.cluster, job.batch) or untrainable(job, layout)
    if wrong:
        raise LayoutError(f"dry run: {'; '.join(wrong)}")
    if layout.offload != "none":
        raise LayoutError(
            f"dry run: offload='{layout.offload}' moves tensors to the host, which a dry run on the CPU cannot tell "
            f"from the device; set layout.offload=none"
        )
    for rank in ranks:
        if not 0 <= rank < layout.world_size:
            raise LayoutError(f"dry run: there is no rank {rank}; the layout has ranks 0 to {layout.world_size - 1}")
    # torch comes in here.
    from kumi.dryrun.compare import compared
    from kumi.dryrun.program import carry_out

    found = [compared(job, layout, rank, carry_out(job, layout, rank)) for rank in ranks]
    return {
        "ranks_in_all": layout.world_size,
        "ranks": found,
        "cost": {
            "cpu_seconds": time.process_time(),
            "host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }


def chosen_ranks(estimate: Estimate, wanted: str | None) -> list[int]:
    """The ranks that `wanted` names: a number, "all-stages" for one of every pipeline rank, or None for one of those
    that the planner says are fullest."""
    layout = estimate.layout
    if wanted == "all-stages":
        return [layout.rank({**layout.coords(0), "pp": index}) for index in range(layout.pp)]
    if wanted is None:
        fullest = max(range(layout.pp), key=lambda index: estimate.memory[index].total)
        return [layout.rank({**layout.coords(0), "pp": fullest})]
    if not wanted.isdecimal():
        raise LayoutError(f"dry run: --rank {wanted} is no rank; give a number from 0, or all-stages")
    return [int(wanted)]
