"""The layout of a run: what the user pinned, and for the rest the fastest that fits and that this version trains."""

from __future__ import annotations

from dataclasses import replace

from kumi.errors import FitError, LayoutError
from kumi.plan.columns import WORDS, columns
from kumi.plan.estimate import estimate
from kumi.plan.fitting import bases_of
from kumi.plan.refusal import does_not_fit, from_pins, why_illegal
from kumi.plan.remedies import Grow
from kumi.plan.search import Found, search
from kumi.plan.space import Pins
from kumi.plan.supported import accepted
from kumi.plan.types import Estimate
from kumi.spec.checks import problems, untrainable, untrained
from kumi.spec.cluster import Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout

# What is taken where nothing else is pinned: it is for the user to want.
TRAINED: Pins = {"sequence_parallel": True, "offload": "none"}

# FLOP/s of a device of which nothing is known: layouts of the data axes differ by what they send and keep.
SOME_FLOPS = 1e14


def choose_layout(job: Job, pinned: Pins, grow: Grow | None = None) -> Estimate:
    """The estimate of the layout that `job` is trained with; `grow` makes the machines larger, for advice.

    Raises LayoutError with the reasons when what is pinned allows no legal layout or none that can be trained, and
    FitError when none fits.
    """
    reasons = untrained(job, Layout(**pinned))
    if reasons:
        raise LayoutError("; ".join(reasons))
    job = replace(job, cluster=replace(job.cluster, device=timed(job.cluster.device, job.precision.matmul_dtype)))
    only = pinned_layout(job, pinned)
    if only is not None and (reasons := untrained(job, only)):
        raise LayoutError("; ".join(reasons))
    found = alone(job, only) if only is not None else search(
        job, {**TRAINED, **pinned}, top=1, front=False, accept=accepted(job, untrained)
    )  # fmt: skip
    if found.plans:
        return found.plans[0]
    if not found.count:
        raise LayoutError(why_illegal(job, pinned))
    if found.smallest is not None and (reasons := untrained(job, found.smallest)):
        raise LayoutError("; ".join(reasons))
    raise FitError(does_not_fit(job, pinned, found, TRAINED, grow))


def pinned_layout(job: Job, pinned: Pins) -> Layout | None:
    """The layout that `pinned` leaves no choice about; None where there is one. Raises LayoutError where it is
    illegal. Fields that no run file needs to name are at their defaults."""
    if "stage_layers" not in pinned:
        return None
    layout = from_pins(job, pinned)
    wrong = problems(job.model, layout, job.cluster, job.batch)
    if wrong:
        raise LayoutError("; ".join(wrong))
    return layout


def alone(job: Job, layout: Layout) -> Found:
    """What a search of one layout finds."""
    one = estimate(job, layout)
    held = bases_of(job, columns([layout])).held(WORDS["offload"].index(layout.offload))[0]
    fits = one.fits and bool(held)
    return Found((one,) if fits else (), (), 1, int(fits), 1, layout if held else None)


def trained(job: Job, pinned: Pins) -> Pins:
    """`pinned`, and what this version's trainer leaves no choice about. Raises LayoutError where it cannot train `job`,
    or not as it is pinned."""
    reasons = untrainable(job, Layout(**pinned))
    if reasons:
        raise LayoutError("; ".join(reasons))
    return {**TRAINED, **pinned}


def timed(device: Device, dtype: str) -> Device:
    """`device` with some peak FLOP/s where none is known, so that layouts can be compared."""
    if device.peak_flops(dtype):
        return device
    return replace(device, peak=((dtype, SOME_FLOPS), ("float32", SOME_FLOPS)))
