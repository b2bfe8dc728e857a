"""Dry runs: run one rank's training step on fake tensors, and compare it with the planner.

result = dry_run(job, layout, [rank])    # plain data: memory by kind, FLOPs, messages, measured and planned
dry_run_tables(result)                   # the same as tables (`kumi.dryrun.dryrun_tables`)
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kumi.errors import LayoutError
from kumi.spec.checks import illegal, unsupported_by_trainer
from kumi.spec.job import Job
from kumi.spec.layout import Layout

if TYPE_CHECKING:
    from kumi.plan.estimates import Estimate


def dry_run(job: Job, layout: Layout, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the memory, FLOPs and messages of each of `ranks` in a step as plain data (see `kumi.dryrun.compare`).

    Raise LayoutError if `layout` is illegal, if this version cannot train it, if it offloads, or if it lacks one of
    `ranks`.
    """
    wrong = illegal(job.model, layout, job.cluster, job.batch) or unsupported_by_trainer(job, layout)
    if wrong:
        raise LayoutError(f"dry run: {'; '.join(wrong)}")
    if layout.offload != "none":
        raise LayoutError(
            f"dry run: offload='{layout.offload}' moves tensors to the host, but in a dry run the CPU stands for the "
            f"device; set layout.offload=none"
        )
    for rank in ranks:
        if not 0 <= rank < layout.world_size:
            raise LayoutError(
                f"dry run: rank {rank} is not in the layout; give a rank from 0 to {layout.world_size - 1}"
            )
    # These modules import torch.
    from kumi.dryrun.compare import compare_rank
    from kumi.dryrun.program import dry_step

    results = [compare_rank(job, layout, rank, dry_step(job, layout, rank)) for rank in ranks]
    return {
        "ranks_in_all": layout.world_size,
        "ranks": results,
        "cost": {
            "cpu_seconds": time.process_time(),
            "host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }


def select_ranks(estimate: Estimate, selection: str | None) -> list[int]:
    """Return the ranks of the `--rank` option.

    `selection` is a number, "all-stages" for one rank at each index of the pp axis, or None for a rank with the largest
    estimated memory. Raise LayoutError for anything else.
    """
    layout = estimate.layout
    if selection == "all-stages":
        return [layout.rank({**layout.coords(0), "pp": index}) for index in range(layout.pp)]
    if selection is None:
        fullest = max(range(layout.pp), key=lambda index: estimate.memory[index].total)
        return [layout.rank({**layout.coords(0), "pp": fullest})]
    if not selection.isdecimal():
        raise LayoutError(f"dry run: --rank {selection} is not a rank; give a number from 0, or all-stages")
    return [int(selection)]
