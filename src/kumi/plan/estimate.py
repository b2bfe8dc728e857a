"""Estimate the memory and step time of layouts.

estimate(job, layout)         one layout: every pp rank, the pipeline simulated
estimate_many(job, layouts)   a batch: at most three pp ranks each, the pipeline by closed form
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kumi.plan.estimates import Estimate, MemoryEstimate, StageEstimate
from kumi.plan.layout_batch import Floats, Ints, LayoutBatch, batch_layouts
from kumi.plan.memory import device_memory
from kumi.plan.memory.device_memory import num_microbatches
from kumi.plan.pipeline.stages import RankStages, first_layer_of_stage, layers_before_largest, rank_stages
from kumi.plan.pipeline.timeline import Timeline, makespan, simulate
from kumi.plan.row_cache import SearchCaches
from kumi.plan.time.kernel_times import peak_flops
from kumi.plan.time.layer_costs import CostTable, cost_table
from kumi.plan.time.step_time import PASS_FIELDS, StepTimes, split_idle, stage_times, stage_transfer_seconds, step_times
from kumi.plan.time.traffic import exposed_collectives
from kumi.plan.time.unit_collectives import tied_grad_seconds
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.schedule import actions, stage_assignment
from kumi.spec.sharding import stage_bounds

# Mean absolute error of step times on the published runs, each source weighted equally (docs/accuracy.md). Layouts
# whose step times differ by less cannot be ranked.
_UNCERTAINTY = 0.11

# Pipelines with pp squared x stages per rank up to this are simulated, which takes some milliseconds. Deeper pipelines
# use the closed form, which is close (tests/plan/test_closed.py).
_MAX_SIMULATED = 2048

# Timelines are built up to this many forward passes in a step, over all stages: more would take seconds.
_MAX_DRAWN_FORWARDS = 100_000


class EstimateBatch(NamedTuple):
    """Estimates of a batch of layouts, (rows,) each: a row per layout.

    `seconds`: seconds of a step.
    `kinds`: seconds of a step by kind, as in `Estimate.time`.
    `memory`: bytes of device memory on the fullest rank.
    `host_memory`: bytes of host memory of a rank.
    """

    seconds: Floats
    kinds: dict[str, Floats]
    memory: Floats
    host_memory: Floats


def estimate(job: Job, layout: Layout) -> Estimate:
    """Estimate memory and step time of `layout`. Raise ConfigError if the cluster lacks a required figure."""
    return with_collectives(job, estimate_for_search(job, layout))


def with_collectives(job: Job, result: Estimate) -> Estimate:
    """Return the estimate `result` with the collectives of the pp rank that has the most work."""
    return replace(
        result, collectives=exposed_collectives(job, result.layout, dict(result.time), _busiest(result.stages))
    )


def estimate_for_search(job: Job, layout: Layout, caches: SearchCaches | None = None) -> Estimate:
    """Return the estimate of `estimate`, but with no collectives listed: a search does not need the list.

    `caches`: figures that were computed for other layouts of `job`.
    """
    batch, ranks = batch_layouts([layout]), np.arange(layout.pp)[:, None]
    costs = cost_table(job, batch, None if caches is None else caches.costs)
    stages = stage_estimates(job, layout, batch, costs)
    times = step_times(job, batch, ranks, np.ones(ranks.shape), layout.stage_layers, costs)
    kinds = _simulated(job, layout, batch, times, stages)
    memory = memory_by_rank(job, batch, ranks, layout.stage_layers, caches)
    return Estimate(
        layout,
        tuple(_memory(memory, rank) for rank in range(layout.pp)),
        device_memory.usable_memory(job),
        sum(kinds.values()),
        tuple(kinds.items()),
        stages,
        (),
        job.batch.tokens_per_step,
        layout.world_size,
        float(job.step_flops()),
        peak_flops(job.cluster.device, job.precision.matmul_dtype),
        _UNCERTAINTY,
        int(device_memory.host_memory(job, batch, rank_share(job, batch, ranks[0], layout.stage_layers))[0]),
    )


def _busiest(stages: Sequence[StageEstimate]) -> int:
    """Return the pp rank with the most work in a microbatch; of several, the first."""
    work: dict[int, float] = {}
    for stage in stages:
        work[stage.rank] = work.get(stage.rank, 0.0) + stage.forward + stage.backward_input + stage.backward_weight
    return max(sorted(work), key=lambda rank: work[rank])


def _memory(memory: dict[str, Floats], rank: int) -> MemoryEstimate:
    """Return the memory of pp rank `rank` from the result of `memory_by_rank` for one layout."""
    return MemoryEstimate(**{kind: round(float(size[rank, 0])) for kind, size in memory.items()})


def _simulated(
    job: Job, layout: Layout, batch: LayoutBatch, times: StepTimes, stages: Sequence[StageEstimate]
) -> dict[str, float]:
    """Return the seconds of a step by kind, with the pipeline's idle time from a simulation of its schedule.

    Pipelines deeper than `_MAX_SIMULATED` keep the closed form's idle time.
    """
    kinds = {kind: float(value[0]) for kind, value in times.kinds.items()}
    if layout.pp == 1 or layout.pp**2 * layout.stages > _MAX_SIMULATED:
        return kinds
    send, microbatches = stage_transfer_seconds(job, batch), job.batch.microbatches(layout)
    durations = [(stage.forward, stage.backward_input, stage.backward_weight) for stage in stages]
    seconds = makespan(
        layout.schedule,
        layout.pp,
        layout.stages,
        microbatches,
        durations,
        float(send[0]),
        blocking=not job.engine.overlap_pp,
    )
    transfers, bubble = split_idle(batch, np.array([seconds]), microbatches * times.work.max(axis=0), send)
    return kinds | {"pp": float(transfers[0] + tied_grad_seconds(job, batch)[0]), "bubble": float(bubble[0])}


def stage_estimates(
    job: Job, layout: Layout, batch: LayoutBatch, costs: tuple[CostTable, Ints]
) -> tuple[StageEstimate, ...]:
    """Return all stages in model order, with their layers and their seconds per microbatch.

    `batch` holds only `layout`; `costs` is the result of `cost_table` for it.
    """
    table, index = costs
    bounds = stage_bounds(layout, job.model.num_hidden_layers)
    stages_of_rank = stage_assignment(layout.schedule, layout.pp, layout.stages)
    rank_of = {stage: rank for rank, held_stages in enumerate(stages_of_rank) for stage in held_stages}
    layer_kinds, kind_of_layer = job.model.unique_layers()
    counts = np.array(
        [[kind_of_layer[first:last].count(kind) for first, last in bounds] for kind in range(len(layer_kinds))], float
    )
    stages = np.arange(len(bounds))
    # True for the last stage of each rank, unless it has no layers.
    ends_rank = [
        end > first and stage == max(stages_of_rank[rank_of[stage]]) for stage, (first, end) in enumerate(bounds)
    ]
    last_kind = np.array([[kind_of_layer[end - 1] == kind for _, end in bounds] for kind in range(len(layer_kinds))])
    last = last_kind * np.array(ends_rank)
    # Each stage counts as a rank of its own, with one microbatch in flight.
    shares = RankStages(
        counts, (stages == 0) * 1.0, (stages == len(bounds) - 1) * 1.0, np.ones(len(bounds)), last * 1.0
    )
    zeros = np.zeros(len(bounds), np.int64)
    layers = counts.sum(axis=0)
    layers_of_rank = np.array([layers[list(stages_of_rank[rank_of[stage]])].sum() for stage in range(len(bounds))])
    times = stage_times(job, batch.take(zeros), shares, table, index[zeros], layers_of_rank)
    return tuple(
        StageEstimate(rank_of[stage], *span, *(float(getattr(times, name)[stage]) for name in PASS_FIELDS))
        for stage, span in enumerate(bounds)
    )


def estimated_timeline(job: Job, result: Estimate) -> Timeline | None:
    """Return the pipeline timeline of an estimate, for a picture.

    None without a pipeline, or with more than `_MAX_DRAWN_FORWARDS` forward passes in a step.
    """
    layout = result.layout
    if layout.pp == 1 or layout.pp * layout.stages * job.batch.microbatches(layout) > _MAX_DRAWN_FORWARDS:
        return None
    programs = actions(layout.schedule, layout.pp, layout.stages, job.batch.microbatches(layout))
    send = float(stage_transfer_seconds(job, batch_layouts([layout]))[0])
    durations = [(stage.forward, stage.backward_input, stage.backward_weight) for stage in result.stages]
    stages_of_rank = stage_assignment(layout.schedule, layout.pp, layout.stages)
    return simulate(programs, stages_of_rank, durations, send, blocking=not job.engine.overlap_pp)


def estimate_many(job: Job, layouts: Sequence[Layout] | LayoutBatch) -> EstimateBatch:
    """Estimate a batch of layouts, from `representative_ranks` and the closed forms of pipeline schedules."""
    batch = layouts if isinstance(layouts, LayoutBatch) else batch_layouts(layouts)
    ranks, counts = representative_ranks(job.model, batch)
    times = step_times(job, batch, ranks, counts)
    peak = np.sum(list(memory_by_rank(job, batch, ranks).values()), axis=0).max(axis=0)
    host = device_memory.host_memory(job, batch, rank_share(job, batch, ranks[0]))
    return EstimateBatch(times.seconds, times.kinds, peak, host)


def representative_ranks(model: ModelSpec, layouts: LayoutBatch) -> tuple[Ints, Floats]:
    """Return three pp ranks, and the number of ranks that each represents, (3, rows): first, inner and last.

    The number is 0 for ranks that do not exist where pp is 1 or 2. The inner rank is the second, or, where a model
    begins with smaller layers, as many mixtures of experts do, the first rank without such layers.
    """
    first, last = np.zeros_like(layouts.pp), layouts.pp - 1
    inner, smaller = np.minimum(1, last), layers_before_largest(model)
    # Each of the `smaller` first layers can move the inner rank by one at most.
    for _ in range(smaller):
        inner = inner + (first_layer_of_stage(model.num_hidden_layers, layouts.pp * layouts.stages, inner) < smaller)
    counts = np.stack([np.ones(len(layouts)), np.maximum(0.0, layouts.pp - 2.0), layouts.pp > 1])
    return np.stack([first, np.minimum(inner, last), last]), counts


def memory_by_rank(
    job: Job, layouts: LayoutBatch, ranks: Ints, stage_layers: Sequence[int] = (), caches: SearchCaches | None = None
) -> dict[str, Floats]:
    """Return the bytes by kind of `MemoryEstimate` on the pp ranks `ranks`; `ranks` and each result: (ranks, rows).

    `stage_layers`: the number of layers of each stage, for all rows; empty for an even division.
    """
    repeated = layouts.take(np.tile(np.arange(len(layouts)), len(ranks)))
    share = rank_share(job, repeated, ranks.ravel(), stage_layers)
    invariant = device_memory.invariant_memory(job, repeated, share, caches)
    sizes = device_memory.stage_memory(job, repeated, share, invariant)
    return {kind: size.reshape(ranks.shape) for kind, size in sizes.items()}


def rank_share(job: Job, layouts: LayoutBatch, rank: Ints, stage_layers: Sequence[int] = ()) -> RankStages:
    """Return, for every layout, the part of the model that its pp rank `rank`, (rows,), holds."""
    return rank_stages(job.model, layouts, rank, num_microbatches(job, layouts), stage_layers)
