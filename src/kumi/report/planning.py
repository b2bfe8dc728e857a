"""The plan of a job: the search, what one might have expected beside it, and what to do where nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kumi.errors import FitError, LayoutError
from kumi.plan.choose import TRAINED, alone, pinned_layout, trained, unasked
from kumi.plan.estimate import estimate, timeline_of
from kumi.plan.refusal import does_not_fit, why_illegal
from kumi.plan.search import Found, search
from kumi.plan.sizing import training
from kumi.plan.space import Pins
from kumi.plan.supported import Unsupported, accepted, none_supported, refuse_unsupported
from kumi.plan.types import Estimate
from kumi.report.expected import expected
from kumi.report.report import Expected, Report
from kumi.spec.job import Job


def plan(
    job: Job,
    pinned: Pins,
    *,
    top: int = 8,
    trainable: bool = False,
    front: bool = True,
    unsupported: Unsupported | None = None,
    tokens: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """The fastest layout of `job` that agrees with `pinned`, with all that explains it; `trainable`: of those that this
    version of kumi trains itself; `unsupported`: of those of which it has nothing to say. `front`: with the front
    of time and memory. `tokens`: say what training on so many takes.

    Raises LayoutError with the reasons where what is pinned is illegal, or not supported, and FitError with the
    smallest change that would help where nothing fits.
    """
    only, fixed = pinned_layout(job, pinned), TRAINED if trainable else {}
    every = trained(job, pinned) if trainable else pinned
    if unsupported is not None:
        refuse_unsupported(job, pinned, unsupported)
    unsupported = unasked(pinned) if trainable else unsupported
    found = (
        alone(job, only)
        if only is not None
        else search(job, every, top=top + 1, front=front, accept=accepted(job, unsupported), progress=progress)
    )
    if not found.plans:
        raise _no_plan(job, pinned, found, fixed, unsupported)
    best, *others = found.plans
    return Report(
        job=job,
        best=best,
        others=tuple(others),
        expected=tuple(_carried_out(job, item, unsupported) for item in expected(job)),
        searched=found.count,
        fitting=found.fitting,
        timeline=timeline_of(job, best),
        front=found.pareto,
        lacking=_lacking(job, found, best),
        training=None if tokens is None else training(tokens, best, job.cluster),
    )


def _carried_out(job: Job, item: Expected, unsupported: Unsupported | None) -> Expected:
    """`item`, with what keeps the trainer that is asked for from carrying it out."""
    if item.estimate is None or unsupported is None:
        return item
    return replace(item, problems=tuple(unsupported(job, item.layout)))


def _no_plan(
    job: Job, pinned: Pins, found: Found, fixed: Pins, unsupported: Unsupported | None
) -> FitError | LayoutError:
    """Why there is none: nothing legal, nothing that fits, or nothing that is supported."""
    if not found.count:
        return LayoutError(why_illegal(job, pinned))
    if unsupported is not None and found.pareto:
        return LayoutError(none_supported(job, found.pareto[0].layout, unsupported))
    return FitError(does_not_fit(job, pinned, found, fixed))


def _lacking(job: Job, found: Found, best: Estimate) -> tuple[Estimate, ...]:
    """Layouts of the best plans, with nothing recomputed or offloaded, that would be faster than `best` and do not
    fit."""
    lighter = {
        replace(one.layout, recompute="none", recompute_layers=None, offload="none"): None for one in found.plans
    }
    made = [estimate(job, layout) for layout in lighter]
    faster = [one for one in made if not one.fits and one.step_seconds < best.step_seconds]
    return tuple(sorted(faster, key=lambda one: one.step_seconds))[:3]
