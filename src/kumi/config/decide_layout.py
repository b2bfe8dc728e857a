"""The layout of a run: the layout that the run folder stores, or a new choice if the stored layout cannot be used.

    a new run, or a run folder without plan.json                     choose, with the pinned fields of the run file
    the pinned fields agree with the stored layout, and it can run   keep the stored layout, without a search
    otherwise                                                        choose, and report the change

A pinned field is given in [layout] of the run file. The run folder's own config.toml pins every field of the layout. If
it is used as the run file, the pinned fields are those of the first start.
"""

from __future__ import annotations

from dataclasses import dataclass

from kumi.config.jobs import PlanInput
from kumi.config.pinned_run import layout_keys
from kumi.config.run_plan import RunPlan, made_for
from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins
from kumi.plan.search.select import estimate_for_training, select_layout, training_problems
from kumi.spec.job import Job
from kumi.spec.layout import Layout


@dataclass(frozen=True)
class LayoutDecision:
    """The layout of a run.

    `estimate`: the layout with its estimate.
    `pinned`: the fields that the run file pins.
    `change`: how and why the layout differs from the stored one, or "".
    """

    estimate: Estimate
    pinned: Pins
    change: str = ""


def decide_layout(planned: PlanInput, stored: RunPlan | None) -> LayoutDecision:
    """Return the layout for the planner's input `planned`, given the `stored` plan of the run, if any.

    Raise LayoutError or FitError if a layout must be chosen, and no layout is legal or no legal layout fits.
    """
    if stored is None:
        return LayoutDecision(select_layout(planned.job, planned.pinned), planned.pinned)
    pinned = stored.pinned if planned.pinned == layout_keys(stored.layout) else planned.pinned
    reason = _reason_to_change(planned.job, pinned, stored)
    if not reason:
        return LayoutDecision(estimate_for_training(planned.job, stored.layout), pinned)
    estimate = select_layout(planned.job, pinned)
    return LayoutDecision(estimate, pinned, _change(stored.layout, estimate.layout, reason))


def _reason_to_change(job: Job, pinned: Pins, stored: RunPlan) -> str:
    """Return the reason why the layout of `stored` cannot be used, or "" if it can.

    The memory of the layout is not checked if the layout was chosen for the same model, batch, precision and machines:
    a later version of kumi or a calibrated cluster file may estimate more memory, but the run has shown that the layout
    fits.
    """
    changed = [f"layout.{name}={value}" for name, value in pinned.items() if getattr(stored.layout, name) != value]
    if changed:
        return f"{' and '.join(changed)} {'is' if len(changed) == 1 else 'are'} pinned now"
    is_same_job = made_for(job) == stored.made_for
    reasons = training_problems(job, stored.layout, memory=not is_same_job)
    return reasons[0].partition("; ")[0] if reasons else ""


def _change(before: Layout, now: Layout, reason: str) -> str:
    """Return `key: old -> new` for each field that differs, and the reason; "" if none differs."""
    fields = [
        f"{name}: {getattr(before, name)!r} -> {getattr(now, name)!r}"
        for name in layout_keys(before) | layout_keys(now)
        if getattr(before, name) != getattr(now, name)
    ]
    if not fields:
        return ""
    return f"{', '.join(fields)}, because {reason}; losses are equal up to rounding only"
