"""The plan of a job: the search, what one might have expected beside it, and what to do where nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kumi.errors import FitError, LayoutError
from kumi.plan import memory
from kumi.plan.estimate import estimate, timeline_of
from kumi.plan.expected import expected
from kumi.plan.remedies import remedies
from kumi.plan.report import Report
from kumi.plan.search import Found, search
from kumi.plan.space import Pins
from kumi.plan.types import Estimate
from kumi.spec.checks import problems
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.units import format_bytes


def plan(job: Job, pinned: Pins, *, top: int = 8, progress: Callable[[float], None] | None = None) -> Report:
    """The fastest layout of `job` that agrees with `pinned`, with all that explains it.

    Raises LayoutError with the reasons where what is pinned is illegal, and FitError with the smallest change that
    would help where nothing fits.
    """
    fixed = pinned_layout(job, pinned)
    found = search(job, pinned, top=top + 1, progress=progress) if fixed is None else alone(job, fixed)
    if not found.plans:
        raise (FitError(does_not_fit(job, pinned, found)) if found.count else LayoutError(why_illegal(job, pinned)))
    best, *others = found.plans
    return Report(
        job=job,
        best=best,
        others=tuple(others),
        expected=expected(job),
        searched=found.count,
        fitting=found.fitting,
        timeline=timeline_of(job, best),
        front=found.pareto,
        lacking=_lacking(job, found, best),
    )


def pinned_layout(job: Job, pinned: Pins) -> Layout | None:
    """The layout that `pinned` leaves no choice about; None where there is one. Raises LayoutError where it is
    illegal. Fields that no run file needs to name are at their defaults."""
    if "stage_layers" not in pinned:
        return None
    layout = _from_pins(job, pinned)
    wrong = problems(job.model, layout, job.cluster, job.batch)
    if wrong:
        raise LayoutError("; ".join(wrong))
    return layout


def alone(job: Job, layout: Layout) -> Found:
    """What a search of one layout finds."""
    one = estimate(job, layout)
    return Found((one,) if one.fits else (), (), 1, int(one.fits), 1, layout)


def _lacking(job: Job, found: Found, best: Estimate) -> tuple[Estimate, ...]:
    """Layouts of the best plans, with less recomputed, that would be faster than `best` and do not fit."""
    lighter = {replace(one.layout, recompute="none", recompute_layers=None) for one in found.plans}
    made = [estimate(job, layout) for layout in lighter]
    faster = [one for one in made if not one.fits and one.step_seconds < best.step_seconds]
    return tuple(sorted(faster, key=lambda one: one.step_seconds))[:3]


def why_illegal(job: Job, pinned: Pins) -> str:
    """What is wrong with the only layouts that `pinned` allows."""
    return "; ".join(problems(job.model, _from_pins(job, pinned), job.cluster, job.batch)) or (
        f"no legal layout of {job.cluster.devices} devices agrees with {_written(pinned)}; pin less"
    )


def _from_pins(job: Job, pinned: Pins) -> Layout:
    """The layout that `pinned` names, with data parallelism over the devices that are left."""
    fields: dict[str, Any] = {name: tuple(value) if name == "stage_layers" else value for name, value in pinned.items()}
    layout = Layout(**fields)
    rest = max(1, job.cluster.devices // layout.world_size)
    if "dp_shard" in pinned and "dp_replicate" in pinned:
        return layout
    if "dp_replicate" in pinned or (layout.zero == 0 and "zero" in pinned):
        grown = "dp_shard" if "dp_replicate" in pinned else "dp_replicate"
        return replace(layout, **{grown: rest * getattr(layout, grown)})
    if "dp_shard" in pinned:
        return replace(layout, dp_replicate=rest)
    return replace(layout, dp_shard=rest, zero=layout.zero or (1 if rest > 1 else 0))


def _written(pinned: Pins) -> str:
    return ", ".join(f"layout.{name}={value}" for name, value in pinned.items()) or "nothing pinned"


def does_not_fit(job: Job, pinned: Pins, found: Found) -> str:
    """Why nothing fits, and the smallest changes that would make something fit, in one sentence."""
    assert found.smallest is not None
    least = estimate(job, found.smallest)
    need, have = format_bytes(least.peak_memory), format_bytes(memory.usable(job.cluster.device))
    changes = remedies(job, pinned, least)
    pins = f" with {_written(pinned)}" if pinned else ""
    return (
        f"the model does not fit: of {found.count:,} layouts{pins} the leanest needs {need} a device, and "
        f"{job.cluster.device.name} has {have} usable; {'; or '.join(changes)}"
    )
