"""The layout of a run: what the user pinned, and for the rest the fastest that fits and that this version trains."""

from __future__ import annotations

from dataclasses import replace

from kumi.errors import FitError, LayoutError
from kumi.plan.refusal import does_not_fit, why_illegal
from kumi.plan.remedies import Grow
from kumi.plan.search import search
from kumi.plan.space import Pins
from kumi.plan.supported import accepted
from kumi.plan.types import Estimate
from kumi.spec.checks import untrainable, untrained
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
    found = search(job, {**TRAINED, **pinned}, top=1, front=False, accept=accepted(job, untrained))
    if found.plans:
        return found.plans[0]
    if not found.count:
        raise LayoutError(why_illegal(job, pinned))
    if found.smallest is not None and (reasons := untrained(job, found.smallest)):
        raise LayoutError("; ".join(reasons))
    raise FitError(does_not_fit(job, pinned, found, TRAINED, grow))


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
