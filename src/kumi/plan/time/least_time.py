"""A lower bound of step times, from the work of microbatches alone: a search times only layouts with a low bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kumi.plan.layout_batch import CHOICES, Floats, Ints, LayoutBatch
from kumi.plan.memory.device_memory import covered_share, num_microbatches
from kumi.plan.pipeline.stages import rank_stages
from kumi.plan.time.layer_costs import CostTable
from kumi.plan.time.op_costs import MicrobatchCost
from kumi.plan.time.step_time import selective_recompute_seconds
from kumi.plan.unique_rows import unique_rows
from kumi.spec.job import Job
from kumi.spec.schedules import FULL_BACKWARD

_NONE, _FULL = (CHOICES["recompute"].index(name) for name in ("none", "full"))

# The bound and the time add the same figures in different orders, and round differently.
_ROUNDING = 1e-9


def least_step_seconds(
    job: Job, layouts: LayoutBatch, ranks: Ints, counts: Floats, costs: tuple[CostTable, Ints]
) -> Floats:
    """Return a lower bound of the seconds that `step_times` returns for the same arguments, (rows,).

    It leaves out data-parallel communication, the update, transfers between stages and to the host, and launches of
    recomputed kernels. A step takes at least the work of the busiest rank in all microbatches. In schedules with full
    backward passes, the pipeline also fills and drains, for the time of one stage of every other rank
    (`Schedule.bubble`, whose other terms are not negative).
    """
    table, index = costs
    # Layouts with equal costs and stages have equal work, but for their recomputation.
    first, shared = unique_rows(index, layouts.pp, layouts.stages, layouts.schedule)
    rows = layouts.take(first)
    busiest, all_ranks = np.zeros(len(layouts)), np.zeros(len(layouts))
    for rank, count in zip(ranks, counts, strict=True):
        work = _rank_work(job, rows, rank[first], table, index[first])
        recomputed = covered_share(layouts, work.layers[shared])
        again = np.where(layouts.recompute == _FULL, work.full[shared], work.selective[shared])
        again = np.where(layouts.recompute == _NONE, 0.0, recomputed * again)
        seconds = np.maximum(work.launched[shared], work.computed[shared] + again)
        busiest, all_ranks = np.maximum(busiest, seconds), all_ranks + count * seconds
    fill = np.where(
        layouts.one_of("schedule", FULL_BACKWARD), np.maximum(0.0, all_ranks - busiest) / layouts.stages, 0.0
    )
    least: Floats = (1 - _ROUNDING) * (num_microbatches(job, layouts) * busiest + fill)
    return least


@dataclass
class _RankWork:
    """Seconds of a microbatch on a rank, without recomputation, (rows,) each.

    `computed`: computation, and exposed communication of its layers.
    `launched`: `computed`, and the waits for the host where it launches kernels more slowly than they run.
    `full`, `selective`: additional seconds if all layers recompute, by kind of recomputation.
    `layers`: the number of layers on the rank.
    """

    computed: Floats
    launched: Floats
    full: Floats
    selective: Floats
    layers: Floats


def _rank_work(job: Job, layouts: LayoutBatch, rank: Ints, table: CostTable, index: Ints) -> _RankWork:
    """Return the work of pp rank `rank` of every row; `index`: the rows of `table`."""
    share = rank_stages(job.model, layouts, rank, np.ones_like(rank))
    computed, launched, full, selective = np.zeros((4, len(layouts)))
    work = _RankWork(computed, launched, full, selective, share.layers.sum(axis=0))
    for cost, count in zip(table.layers, share.layers, strict=True):
        _add_work(job, work, cost, index, count)
        work.full += count * (cost.forward + sum(cost.comm_full.values()))[index]
        selective = selective_recompute_seconds(job, cost) + sum(cost.comm_selective.values())
        work.selective += count * selective[index]
    for cost, count in ((table.head, share.head), (table.embedding, share.embedding)):
        _add_work(job, work, cost, index, count)
    return work


def _add_work(job: Job, work: _RankWork, cost: MicrobatchCost, index: Ints, count: Floats) -> None:
    """Add `count` times `cost` to `work`, without recomputation."""
    launch = job.cluster.device.launch * job.engine.dispatch
    forward = cost.forward + sum(cost.comm_forward.values())
    backward = cost.backward + cost.weight + sum(cost.comm_backward.values())
    launched = np.maximum(forward, launch * cost.kernels_forward)
    launched = launched + np.maximum(backward, launch * cost.kernels_backward)
    work.computed += count * (forward + backward)[index]
    work.launched += count * launched[index]
