"""The estimate of a layout: what fits, how long a step takes, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.plan import memory, stages
from kumi.plan.columns import Columns, Floats, Ints, columns
from kumi.plan.kernels import peak_flops
from kumi.plan.step import Stage, microbatches_of, step
from kumi.plan.traffic import traffic
from kumi.plan.types import Estimate, MemoryEstimate, StageEstimate
from kumi.spec import ledger
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.schedule import placement

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
    found = step(job, x, ranks, [np.ones(1)] * layout.pp)
    kinds = {kind: float(value[0]) for kind, value in found.kinds.items()}
    return Estimate(
        layout,
        tuple(_memory(job, x, rank) for rank in ranks),
        memory.usable(job.cluster.device),
        sum(kinds.values()),
        tuple(kinds.items()),
        _stages(job, layout, found.stages),
        traffic(job, layout, kinds),
        job.batch.tokens_per_step,
        layout.world_size,
        float(ledger.train_flops(job.model, job.batch.tokens_per_step, job.batch.seq_len)),
        peak_flops(job.cluster.device, job.precision.matmul_dtype),
        UNCERTAINTY,
        int(memory.host_memory(job, x, _share(job, x, ranks[0]))[0]),
    )


def estimate_many(job: Job, layouts: Sequence[Layout] | Columns) -> Many:
    """The same for many layouts at once, pipelines by their closed form: from the first, the last and a middle stage."""
    x = layouts if isinstance(layouts, Columns) else columns(layouts)
    ranks, counts = positions(x)
    found = step(job, x, ranks, counts)
    host = memory.host_memory(job, x, _share(job, x, ranks[0]))
    return Many(found.seconds, found.kinds, peak_memory(job, x, ranks), host)


def positions(x: Columns) -> tuple[list[Ints], list[Floats]]:
    """The pp ranks that are looked at, and how many like each there are: the first, the second for all inner ones, and
    the last. In a pipeline of one or two, some stand for none."""
    first, last = np.zeros_like(x.pp), x.pp - 1
    inner = np.minimum(1, last)
    return [first, inner, last], [np.ones(len(x)), np.maximum(0.0, x.pp - 2.0), (x.pp > 1).astype(np.float64)]


def peak_memory(job: Job, x: Columns, ranks: list[Ints]) -> Floats:
    """Bytes of the fullest of `ranks`, (rows,)."""
    every = [sum(memory.stage_memory(job, x, _share(job, x, rank)).values()) for rank in ranks]
    found: Floats = np.max(np.stack(every), axis=0)
    return found


def _share(job: Job, x: Columns, rank: Ints) -> stages.Share:
    return stages.share(job.model, x, rank, microbatches_of(job, x))


def _memory(job: Job, x: Columns, rank: Ints) -> MemoryEstimate:
    found = memory.stage_memory(job, x, _share(job, x, rank))
    return MemoryEstimate(**{kind: round(float(size[0])) for kind, size in found.items()})


def _stages(job: Job, layout: Layout, found: Sequence[Stage]) -> tuple[StageEstimate, ...]:
    """Every stage with its layers and its part of its rank's seconds."""
    bounds = stages.bounds(layout, job.model)
    listed = []
    for rank, held in enumerate(placement(layout.schedule, layout.pp, layout.stages)):
        layers = [bounds[number][1] - bounds[number][0] for number in held]
        for number, count in zip(held, layers, strict=True):
            part = count / max(1, sum(layers))
            seconds = [part * float(getattr(found[rank], name)[0]) for name in ("forward", "backward", "weight")]
            listed.append(StageEstimate(rank, *bounds[number], *seconds))
    return tuple(sorted(listed, key=lambda one: (one.first, one.last)))
