"""The order of plans under uncertain estimates: which comes first, and which runners-up are worth showing.

A plan's expected time is its step time, increased by the cost of running out of memory times its probability. Plans
whose expected times differ by less than the error between two layouts of one job cannot be ranked: the simplest of them
comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from kumi.plan.estimates import Estimate
from kumi.plan.uncertainty.intervals import EXTRAPOLATED_WIDTH, fit_probability
from kumi.plan.uncertainty.margin import memory_errors
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.schedules import SCHEDULES

# How much the errors of the estimates of two layouts of one job differ: the median of published pairs whose estimates
# differ by at most 30 %, and of such medians the median over experiments (benchmarks/planner_intervals.py prints it).
TIE_TOLERANCE = 0.07
# The 80 % quantile of the same pairs. The error of a technique that no published run measures is taken to be as large.
_UNMEASURED_ERROR = 0.14

# The cost of a plan that runs out of memory, in training times: another plan must be made and the run started again.
# This is a judgement.
_FAILURE_COST = 0.5


def cautious_seconds(layout: Layout, seconds: float) -> float:
    """Return `seconds` of a step, more where `layout` uses a technique that no published run measures.

    So such a technique is chosen only for a gain that the estimate's error cannot explain.
    """
    return seconds * (1 + _UNMEASURED_ERROR * (layout.offload != "none"))


def expected_seconds(job: Job, plan: Estimate) -> float:
    """Return the expected time of a step, with the cost of running out of memory in it."""
    width = EXTRAPOLATED_WIDTH if plan.layout.offload != "none" else 1.0
    fits = fit_probability(memory_errors(job), plan.peak_memory, job.cluster.device.memory, width)
    return cautious_seconds(plan.layout, plan.step_seconds) * (1 + _FAILURE_COST * (1 - fits))


def rank_plans(job: Job, plans: Sequence[Estimate], top: int, smaller: Sequence[Estimate] = ()) -> tuple[Estimate, ...]:
    """Return at most `top` of `plans`: the recommended one, then runners-up, fastest first.

    The recommended plan is the simplest of those that tie for the least expected time. Runners-up are the fastest of
    every other kind, and more of the same kinds only where there are fewer kinds than `top`.

    `smaller`: slower versions of `plans` with less memory. One may be recommended, but none is a runner-up.
    """
    if not plans:
        return ()
    candidates = (*plans, *smaller)
    expected = {id(plan): expected_seconds(job, plan) for plan in candidates}
    limit = (1 + TIE_TOLERANCE) * min(expected.values())
    ties = [plan for plan in candidates if expected[id(plan)] <= limit]
    best = min(ties, key=lambda plan: (complexity(plan.layout), expected[id(plan)]))
    by_time = sorted((plan for plan in plans if plan is not best), key=attrgetter("step_seconds"))
    kinds, first_of_kind = {_kind(best.layout)}, set()
    for plan in by_time:
        if _kind(plan.layout) not in kinds:
            kinds.add(_kind(plan.layout))
            first_of_kind.add(id(plan))
    chosen = sorted(by_time, key=lambda plan: id(plan) not in first_of_kind)[: top - 1]
    return (best, *sorted(chosen, key=attrgetter("step_seconds")))


def _kind(layout: Layout) -> tuple[object, ...]:
    """Return the techniques that a layout uses: layouts of one kind differ in numbers only."""
    degrees = (layout.pp, layout.tp, layout.cp, layout.ep)
    return (*(degree > 1 for degree in degrees), layout.zero == 3, layout.recompute, layout.offload)


def complexity(layout: Layout) -> int:
    """Return a score that grows with the techniques that `layout` uses, to prefer the simplest of equally fast layouts.

    Offloading counts twice, since other processes use the host and the bus, too; so do schedules that few trainers
    have.
    """
    used = (
        layout.pp > 1,
        layout.cp > 1,
        layout.tp > 1,
        layout.ep > 1,
        layout.offload != "none",
        layout.dp_replicate > 1 and layout.dp_shard > 1,
        layout.recompute != "none",
    )
    rare = (layout.offload != "none", not SCHEDULES[layout.schedule].common)
    return 4 * sum((*used, *rare)) + layout.zero + (layout.stages > 1) + bool(layout.stage_layers)
