"""Plan a job: search its layouts, estimate the standard layouts for comparison, and explain a failed search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kumi.errors import FitError, LayoutError
from kumi.plan.estimate import estimate, estimated_timeline
from kumi.plan.estimates import Estimate
from kumi.plan.node_counts import try_node_counts
from kumi.plan.report import Report, StandardLayout
from kumi.plan.search.candidates import Pins
from kumi.plan.search.diagnose import (
    UnsupportedFn,
    accept_supported,
    explain_illegal,
    explain_no_fit,
    explain_none_supported,
    require_supported,
)
from kumi.plan.search.search_layouts import SearchResult, search
from kumi.plan.search.select import (
    TRAINER_PINS,
    fully_pinned_layout,
    search_single,
    trainable_pins,
    unsupported_by_kumi,
)
from kumi.plan.search.sizing import training_cost
from kumi.plan.standard_layouts import estimate_standard_layouts
from kumi.plan.uncertainty.of_estimate import estimate_uncertainty
from kumi.spec.job import Job


def plan(
    job: Job,
    pinned: Pins,
    *,
    top: int = 8,
    trainable: bool = False,
    front: bool = True,
    unsupported: UnsupportedFn | None = None,
    tokens: float | None = None,
    other_nodes: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Return the report on the fastest layout of `job` that fits and agrees with `pinned`.

    `pinned`: fields of the layout that the user has fixed, with their values.
    `top`: the number of runners-up. `trainable`: search only layouts that this version of kumi trains itself.
    `unsupported`: reasons why a trainer does not support a layout; search only layouts without any. `front`: include
    the Pareto front. `tokens`: include the time and cost of training on this many tokens.
    `other_nodes`: include plans for other numbers of nodes. `progress`: called with the fraction done, 0 to 1.

    Raise LayoutError with the reasons if the pinned fields are illegal or unsupported, and FitError with the smallest
    change that would help if nothing fits.
    """
    single, trainer_pins = fully_pinned_layout(job, pinned), TRAINER_PINS if trainable else {}
    pins = trainable_pins(job, pinned) if trainable else pinned
    if unsupported is not None:
        require_supported(job, pinned, unsupported)
    unsupported = unsupported_by_kumi(pinned) if trainable else unsupported
    result = (
        search_single(job, single)
        if single is not None
        else search(job, pins, top=top + 1, front=front, accept=accept_supported(job, unsupported), progress=progress)
    )
    if not result.plans:
        raise _no_plan(job, pinned, pins, result, trainer_pins, unsupported)
    best, *others = result.plans
    return Report(
        job=job,
        best=best,
        others=tuple(others),
        expected=tuple(_with_support(job, item, unsupported) for item in estimate_standard_layouts(job)),
        searched=result.count,
        fitting=result.fitting,
        timeline=estimated_timeline(job, best),
        front=result.pareto,
        lacking=_faster_but_too_large(job, result, best),
        training=None if tokens is None else training_cost(tokens, best, job.cluster),
        node_counts=try_node_counts(job, pins, best.layout, unsupported) if other_nodes else (),
        pinned=pinned,
        uncertainty=estimate_uncertainty(job, best),
    )


def _with_support(job: Job, item: StandardLayout, unsupported: UnsupportedFn | None) -> StandardLayout:
    """Return `item` with the reasons why the requested trainer does not support it."""
    if item.estimate is None or unsupported is None:
        return item
    return replace(item, problems=tuple(unsupported(job, item.layout)))


def _no_plan(
    job: Job, pinned: Pins, pins: Pins, result: SearchResult, trainer_pins: Pins, unsupported: UnsupportedFn | None
) -> FitError | LayoutError:
    """Return the error for a search with `pins` without a plan: no layout is legal, supported, or small enough."""
    if not result.count:
        return LayoutError(explain_illegal(job, pinned))
    if unsupported is not None and result.fitting:
        unsupported_plans = search(job, pins, top=1, front=False).plans
        if unsupported_plans:
            return LayoutError(explain_none_supported(job, unsupported_plans[0].layout, unsupported))
    return FitError(explain_no_fit(job, pinned, result, trainer_pins))


def _faster_but_too_large(job: Job, result: SearchResult, best: Estimate) -> tuple[Estimate, ...]:
    """Return at most three layouts that are faster than `best` and do not fit, fastest first.

    The candidates are the plans of `result` with recomputation and offloading turned off.
    """
    layouts = {
        replace(plan.layout, recompute="none", recompute_layers=None, offload="none"): None for plan in result.plans
    }
    estimates = [estimate(job, layout) for layout in layouts]
    faster = [item for item in estimates if not item.fits and item.step_seconds < best.step_seconds]
    return tuple(sorted(faster, key=lambda item: item.step_seconds))[:3]
