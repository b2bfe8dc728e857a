"""The estimate of a layout: what fits, how long a step takes, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.plan import memory
from kumi.plan.columns import Columns, Floats, Ints, columns
from kumi.plan.kernels import peak_flops
from kumi.plan.stages import Share, bounds, share
from kumi.plan.step import SIDES, Step, microbatches_of, send_seconds, stage, step, waits
from kumi.plan.timeline import Timeline, makespan, simulate
from kumi.plan.traffic import traffic
from kumi.plan.types import Estimate, MemoryEstimate, StageEstimate
from kumi.plan.work import table
from kumi.spec import ledger
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.schedule import actions, placement

# Mean absolute error of step times on the published runs (docs/accuracy.md): a smaller gap says nothing.
UNCERTAINTY = 0.10


@dataclass(frozen=True)
class Many:
    """Estimates of layouts, one row each: seconds of a step and by kind, bytes of the fullest rank and of the host."""

    seconds: Floats
    kinds: dict[str, Floats]
    memory: Floats
    host_memory: Floats


def estimate(job: Job, layout: Layout) -> Estimate:
    """What `layout` needs and how fast it is. Raises ConfigError where the cluster's description lacks a figure."""
    x = columns([layout])
    ranks = [np.array([rank]) for rank in range(layout.pp)]
    kinds = _simulated(job, layout, x, step(job, x, ranks, [np.ones(1)] * layout.pp, layout.stage_layers))
    return Estimate(
        layout,
        tuple(_memory(job, x, rank, layout.stage_layers) for rank in ranks),
        memory.usable(job.cluster.device),
        sum(kinds.values()),
        tuple(kinds.items()),
        stages_of(job, layout, x),
        traffic(job, layout, kinds),
        job.batch.tokens_per_step,
        layout.world_size,
        float(ledger.train_flops(job.model, job.batch.tokens_per_step, job.batch.seq_len)),
        peak_flops(job.cluster.device, job.precision.matmul_dtype),
        UNCERTAINTY,
        int(memory.host_memory(job, x, share_of(job, x, ranks[0], layout.stage_layers))[0]),
    )


def _simulated(job: Job, layout: Layout, x: Columns, found: Step) -> dict[str, float]:
    """Seconds of a step by kind, with the pipeline's waits from its list of actions instead of the closed form."""
    kinds = {kind: float(value[0]) for kind, value in found.kinds.items()}
    if layout.pp == 1:
        return kinds
    send, microbatches = send_seconds(job, x), job.batch.microbatches(layout)
    durations = [(one.forward, one.backward_input, one.backward_weight) for one in stages_of(job, layout, x)]
    length = makespan(
        layout.schedule, layout.pp, layout.stages, microbatches, durations, float(send[0]),
        blocking=not job.engine.overlap_pp,
    )  # fmt: skip
    busy = microbatches * np.max([one.total for one in found.stages], axis=0)
    messages, bubble = waits(x, np.array([length]), busy, send)
    return kinds | {"pp": float(messages[0]), "bubble": float(bubble[0])}


def stages_of(job: Job, layout: Layout, x: Columns) -> tuple[StageEstimate, ...]:
    """Every stage, in model order, with its layers and its seconds for a microbatch."""
    costs, index = table(job, x)
    where, held = bounds(layout, job.model), placement(layout.schedule, layout.pp, layout.stages)
    rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    kinds, of_layer = job.model.layer_kinds()
    counts = np.array(
        [[of_layer[first:last].count(kind) for first, last in where] for kind in range(len(kinds))], float
    )
    ends = np.arange(len(where))
    part = Share(counts, (ends == 0) * 1.0, (ends == len(where) - 1) * 1.0, np.ones(len(where)))
    same = np.zeros(len(where), np.int64)
    work = stage(job, x.take(same), part, costs, index[same])
    return tuple(
        StageEstimate(rank_of[number], *span, *(float(getattr(work, name)[number]) for name in SIDES))
        for number, span in enumerate(where)
    )


def timeline_of(job: Job, found: Estimate) -> Timeline | None:
    """The pipeline of `found` in time, for a picture; None where there is no pipeline."""
    layout = found.layout
    if layout.pp == 1:
        return None
    lists = actions(layout.schedule, layout.pp, layout.stages, job.batch.microbatches(layout))
    send = float(send_seconds(job, columns([layout]))[0])
    durations = [(one.forward, one.backward_input, one.backward_weight) for one in found.stages]
    held = placement(layout.schedule, layout.pp, layout.stages)
    return simulate(lists, held, durations, send, blocking=not job.engine.overlap_pp)


def estimate_many(job: Job, layouts: Sequence[Layout] | Columns) -> Many:
    """The same for many layouts at once: from the first, the second and the last stage, pipelines by closed form."""
    x = layouts if isinstance(layouts, Columns) else columns(layouts)
    ranks, counts = positions(x)
    found = step(job, x, ranks, counts)
    host = memory.host_memory(job, x, share_of(job, x, ranks[0]))
    return Many(found.seconds, found.kinds, peak_memory(job, x, ranks), host)


def positions(x: Columns) -> tuple[list[Ints], list[Floats]]:
    """The pp ranks that are looked at, and how many like each there are: the first, the second for all inner ones, and
    the last. In a pipeline of one or two, some stand for none."""
    first, last = np.zeros_like(x.pp), x.pp - 1
    inner = np.minimum(1, last)
    return [first, inner, last], [np.ones(len(x)), np.maximum(0.0, x.pp - 2.0), (x.pp > 1).astype(np.float64)]


def peak_memory(job: Job, x: Columns, ranks: list[Ints]) -> Floats:
    """Bytes of the fullest of `ranks`, (rows,)."""
    every = [sum(memory.stage_memory(job, x, share_of(job, x, rank)).values()) for rank in ranks]
    found: Floats = np.max(np.stack(every), axis=0)
    return found


def share_of(job: Job, x: Columns, rank: Ints, stage_layers: Sequence[int] = ()) -> Share:
    """What pp rank `rank` of every row holds."""
    return share(job.model, x, rank, microbatches_of(job, x), stage_layers)


def _memory(job: Job, x: Columns, rank: Ints, stage_layers: Sequence[int]) -> MemoryEstimate:
    found = memory.stage_memory(job, x, share_of(job, x, rank, stage_layers))
    return MemoryEstimate(**{kind: round(float(size[0])) for kind, size in found.items()})
