"""The estimate of a layout: what fits, how long a step takes, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.plan.estimates import Estimate, MemoryEstimate, StageEstimate
from kumi.plan.layout_batch import Columns, Floats, Ints, columns
from kumi.plan.memory import device_memory
from kumi.plan.memory.device_memory import microbatches_of
from kumi.plan.pipeline.stages import Share, before_largest, even_first, share
from kumi.plan.pipeline.timeline import Timeline, makespan, simulate
from kumi.plan.time.kernel_times import peak_flops
from kumi.plan.time.layer_costs import Table, table
from kumi.plan.time.step_time import SIDES, Step, send_seconds, stage, step, waits
from kumi.plan.time.traffic import traffic
from kumi.spec import ledger
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.schedule import actions, placement
from kumi.spec.sharding import stage_bounds

# Mean absolute error of step times on the published runs, every source counted once (docs/accuracy.md): a smaller gap
# says nothing.
UNCERTAINTY = 0.11

# Ranks squared times stages of a rank of the deepest pipelines that are simulated for an estimate: it takes some
# milliseconds. The closed form is near for the others (tests/plan/test_closed.py).
SIMULATED = 2048


# Forward passes of a step, over all stages, beyond which a pipeline's timeline is not made: it would take seconds.
DRAWN = 100_000


@dataclass(frozen=True)
class Many:
    """Estimates of layouts, one row each: seconds of a step and by kind, bytes of the fullest rank and of the host."""

    seconds: Floats
    kinds: dict[str, Floats]
    memory: Floats
    host_memory: Floats


def estimate(job: Job, layout: Layout) -> Estimate:
    """What `layout` needs and how fast it is. Raises ConfigError where the cluster's description lacks a figure."""
    x, ranks = columns([layout]), np.arange(layout.pp)[:, None]
    known = table(job, x)
    stages = stages_of(job, layout, x, known)
    found = step(job, x, ranks, np.ones(ranks.shape), layout.stage_layers, known)
    kinds = _simulated(job, layout, x, found, stages)
    held = memory_of(job, x, ranks, layout.stage_layers)
    return Estimate(
        layout,
        tuple(_memory(held, rank) for rank in range(layout.pp)),
        device_memory.usable(job.cluster.device),
        sum(kinds.values()),
        tuple(kinds.items()),
        stages,
        traffic(job, layout, kinds, _busiest(stages)),
        job.batch.tokens_per_step,
        layout.world_size,
        float(ledger.train_flops(job.model, job.batch.tokens_per_step, job.batch.seq_len)),
        peak_flops(job.cluster.device, job.precision.matmul_dtype),
        UNCERTAINTY,
        int(device_memory.host_memory(job, x, share_of(job, x, ranks[0], layout.stage_layers))[0]),
    )


def _busiest(stages: Sequence[StageEstimate]) -> int:
    """The pp rank that decides the length of a step: the first of those with most work in a microbatch."""
    work: dict[int, float] = {}
    for one in stages:
        work[one.rank] = work.get(one.rank, 0.0) + one.forward + one.backward_input + one.backward_weight
    return max(sorted(work), key=lambda rank: work[rank])


def _memory(held: dict[str, Floats], rank: int) -> MemoryEstimate:
    return MemoryEstimate(**{kind: round(float(size[rank, 0])) for kind, size in held.items()})


def _simulated(job: Job, layout: Layout, x: Columns, found: Step, stages: Sequence[StageEstimate]) -> dict[str, float]:
    """Seconds of a step by kind, with the pipeline's waits from its list of actions instead of the closed form, where
    the pipeline is no deeper than `SIMULATED`."""
    kinds = {kind: float(value[0]) for kind, value in found.kinds.items()}
    if layout.pp == 1 or layout.pp**2 * layout.stages > SIMULATED:
        return kinds
    send, microbatches = send_seconds(job, x), job.batch.microbatches(layout)
    durations = [(one.forward, one.backward_input, one.backward_weight) for one in stages]
    length = makespan(
        layout.schedule,
        layout.pp,
        layout.stages,
        microbatches,
        durations,
        float(send[0]),
        blocking=not job.engine.overlap_pp,
    )
    messages, bubble = waits(x, np.array([length]), microbatches * found.work.max(axis=0), send)
    return kinds | {"pp": float(messages[0]), "bubble": float(bubble[0])}


def stages_of(job: Job, layout: Layout, x: Columns, known: tuple[Table, Ints]) -> tuple[StageEstimate, ...]:
    """Every stage, in model order, with its layers and its seconds for a microbatch."""
    costs, index = known
    where, held = (
        stage_bounds(layout, job.model.num_hidden_layers),
        placement(layout.schedule, layout.pp, layout.stages),
    )
    rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    kinds, of_layer = job.model.layer_kinds()
    counts = np.array(
        [[of_layer[first:last].count(kind) for first, last in where] for kind in range(len(kinds))], float
    )
    ends = np.arange(len(where))
    # Of the layers of a rank's last stage, the last one.
    ending = [end > first and number == max(held[rank_of[number]]) for number, (first, end) in enumerate(where)]
    last = np.array([[of_layer[end - 1] == kind for _, end in where] for kind in range(len(kinds))]) * np.array(ending)
    part = Share(counts, (ends == 0) * 1.0, (ends == len(where) - 1) * 1.0, np.ones(len(where)), last * 1.0)
    same = np.zeros(len(where), np.int64)
    layers = counts.sum(axis=0)
    of_rank = np.array([layers[list(held[rank_of[number]])].sum() for number in range(len(where))])
    work = stage(job, x.take(same), part, costs, index[same], of_rank)
    return tuple(
        StageEstimate(rank_of[number], *span, *(float(getattr(work, name)[number]) for name in SIDES))
        for number, span in enumerate(where)
    )


def timeline_of(job: Job, found: Estimate) -> Timeline | None:
    """The pipeline of `found` in time, for a picture; None where there is no pipeline, or one of more microbatches than
    anyone draws."""
    layout = found.layout
    if layout.pp == 1 or layout.pp * layout.stages * job.batch.microbatches(layout) > DRAWN:
        return None
    lists = actions(layout.schedule, layout.pp, layout.stages, job.batch.microbatches(layout))
    send = float(send_seconds(job, columns([layout]))[0])
    durations = [(one.forward, one.backward_input, one.backward_weight) for one in found.stages]
    held = placement(layout.schedule, layout.pp, layout.stages)
    return simulate(lists, held, durations, send, blocking=not job.engine.overlap_pp)


def estimate_many(job: Job, layouts: Sequence[Layout] | Columns) -> Many:
    """The same for many layouts at once: from the first, an inner and the last stage, pipelines by closed form."""
    x = layouts if isinstance(layouts, Columns) else columns(layouts)
    ranks, counts = positions(job.model, x)
    found = step(job, x, ranks, counts)
    peak = np.sum(list(memory_of(job, x, ranks).values()), axis=0).max(axis=0)
    return Many(found.seconds, found.kinds, peak, device_memory.host_memory(job, x, share_of(job, x, ranks[0])))


def positions(model: ModelSpec, x: Columns) -> tuple[Ints, Floats]:
    """The pp ranks that are looked at, and how many like each there are, (3, rows): the first, one for all inner ones,
    and the last. In a pipeline of one or two, some stand for none.

    Of the inner ones it is the second, or, where a model begins with smaller layers than the rest, as mixtures of
    experts do, the first that has only the larger.
    """
    first, last = np.zeros_like(x.pp), x.pp - 1
    inner, smaller = np.minimum(1, last), before_largest(model)
    for _ in range(smaller):
        inner = inner + (even_first(model.num_hidden_layers, x.pp * x.stages, inner) < smaller)
    counts = np.stack([np.ones(len(x)), np.maximum(0.0, x.pp - 2.0), x.pp > 1])
    return np.stack([first, np.minimum(inner, last), last]), counts


def memory_of(job: Job, x: Columns, ranks: Ints, stage_layers: Sequence[int] = ()) -> dict[str, Floats]:
    """Bytes of every kind on pp ranks `ranks`, (ranks, rows)."""
    every = x.take(np.tile(np.arange(len(x)), len(ranks)))
    found = device_memory.stage_memory(job, every, share_of(job, every, ranks.ravel(), stage_layers))
    return {kind: size.reshape(ranks.shape) for kind, size in found.items()}


def share_of(job: Job, x: Columns, rank: Ints, stage_layers: Sequence[int] = ()) -> Share:
    """What pp rank `rank` of every row holds."""
    return share(job.model, x, rank, microbatches_of(job, x), stage_layers)
