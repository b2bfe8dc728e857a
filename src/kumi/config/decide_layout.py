"""The layout of a run: kept as the run began, or chosen anew where it cannot stay.

    a new run, or one of a version without plans    chosen for what the run file pins
    the run file pins nothing else, and it can run  kept, whatever a search would choose today
    else                                            chosen anew for what the run file pins, and the change is said

The run folder's own config.toml pins every field. Where it is the run file, what the run began with counts as pinned.
"""

from __future__ import annotations

from dataclasses import dataclass

from kumi.config.jobs import PlanInput
from kumi.config.pinned_run import spelled
from kumi.config.run_plan import RunPlan, made_for
from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins
from kumi.plan.search.select import estimate_for_training, select_layout, training_problems
from kumi.spec.job import Job
from kumi.spec.layout import Layout


@dataclass(frozen=True)
class Decision:
    """The estimate of the layout, the fields that the run file pins, and the change of a run that has begun, or ""."""

    estimate: Estimate
    pinned: Pins
    change: str = ""


def decide(asked: PlanInput, before: RunPlan | None) -> Decision:
    """Return the layout for what is `asked`, where the run had the plan `before`.

    Raise LayoutError or FitError where one must be chosen and none can be.
    """
    if before is None:
        return Decision(select_layout(asked.job, asked.pinned), asked.pinned)
    pinned = before.pinned if asked.pinned == spelled(before.layout) else asked.pinned
    reason = _why_anew(asked.job, pinned, before)
    if not reason:
        return Decision(estimate_for_training(asked.job, before.layout), pinned)
    estimate = select_layout(asked.job, pinned)
    return Decision(estimate, pinned, _change(before.layout, estimate.layout, reason))


def _why_anew(job: Job, pinned: Pins, before: RunPlan) -> str:
    """Return why the layout of `before` cannot stay; "" where it can.

    It is not refused for its memory where it was made for the same model on the same machines, whatever a later version
    or a calibrated cluster file estimates.
    """
    others = [f"layout.{name}={value}" for name, value in pinned.items() if getattr(before.layout, name) != value]
    if others:
        return f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} pinned now"
    same = made_for(job) == before.made_for
    reasons = training_problems(job, before.layout, memory=not same)
    return reasons[0].partition("; ")[0] if reasons else ""


def _change(before: Layout, now: Layout, reason: str) -> str:
    """Return `key: old -> new` for each field that differs, with the reason; "" where none does."""
    fields = [
        f"{name}: {getattr(before, name)!r} -> {getattr(now, name)!r}"
        for name in spelled(before) | spelled(now)
        if getattr(before, name) != getattr(now, name)
    ]
    if not fields:
        return ""
    return f"{', '.join(fields)}, because {reason}; losses are equal up to rounding only"
