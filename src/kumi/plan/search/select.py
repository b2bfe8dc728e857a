"""The layout of a run: what the user pinned, and for the rest the fastest that fits and that this version trains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace

from kumi.errors import FitError, LayoutError
from kumi.plan.estimate import estimate
from kumi.plan.estimates import Estimate
from kumi.plan.layout_batch import CHOICES, batch_layouts
from kumi.plan.memory.device_memory import usable_memory
from kumi.plan.search.candidates import Pins
from kumi.plan.search.fitting import bases_of
from kumi.plan.search.refusal import does_not_fit, from_pins, leading, why_illegal
from kumi.plan.search.search_layouts import Found, search
from kumi.plan.search.supported import Unsupported, accepted
from kumi.spec.checks import problems
from kumi.spec.cluster import Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.trainable import untrainable, untrained
from kumi.units import format_bytes

# Taken where it is not pinned: tensor parallelism without its sequence part needs more memory for as many bytes sent.
TRAINED: Pins = {"sequence_parallel": True}


def unasked(pinned: Pins) -> Unsupported:
    """Return what keeps this version's trainer from a layout that a search may choose beside what is `pinned`: what it
    does not train, and drives, which it writes to only where the user wants that."""

    def reasons(job: Job, layout: Layout) -> list[str]:
        drives = layout.offload.endswith("-nvme") and "offload" not in pinned
        wanted = [f"offload='{layout.offload}' writes to drives in every step; pin layout.offload to have it"] * drives
        return [*untrained(job, layout), *wanted]

    return reasons


# FLOP/s of a device of which nothing is known: layouts of the data axes differ by what they send and keep.
SOME_FLOPS = 1e14


def choose_layout(job: Job, pinned: Pins) -> Estimate:
    """The estimate of the layout that `job` is trained with.

    Raises LayoutError with the reasons when what is pinned allows no legal layout or none that can be trained, and
    FitError when none fits.
    """
    reasons = _settled(untrained(job, Layout(**pinned)), pinned)
    if reasons:
        raise LayoutError(leading(reasons, pinned))
    job = _timed_job(job)
    only = pinned_layout(job, pinned)
    if only is not None and (reasons := untrained(job, only)):
        raise LayoutError(leading(reasons, pinned))
    found = (
        alone(job, only)
        if only is not None
        else search(job, {**TRAINED, **pinned}, top=1, front=False, accept=accepted(job, unasked(pinned)))
    )
    if found.plans:
        return found.plans[0]
    if not found.count:
        raise LayoutError(why_illegal(job, pinned))
    if found.smallest is not None and (reasons := unasked(pinned)(job, found.smallest)):
        raise LayoutError(leading(reasons, pinned))
    raise FitError(does_not_fit(job, pinned, found, TRAINED))


def _settled(reasons: Sequence[str], pinned: Pins) -> list[str]:
    """Return the `reasons` that no choice of the search can remove: all fields of the layout in them are `pinned`."""
    free = {field.name for field in fields(Layout)} - set(pinned)
    return [reason for reason in reasons if not free & set(re.findall(r"\b(\w+)=", reason))]


def pinned_layout(job: Job, pinned: Pins) -> Layout | None:
    """The layout that `pinned` leaves no choice about; None where there is one. Raises LayoutError where it is
    illegal. Fields that no run file needs to name are at their defaults."""
    if "stage_layers" not in pinned:
        return None
    layout = from_pins(job, pinned)
    wrong = problems(job.model, layout, job.cluster, job.batch)
    if wrong:
        raise LayoutError(leading(wrong, pinned))
    return layout


def alone(job: Job, layout: Layout) -> Found:
    """What a search of one layout finds."""
    one = estimate(job, layout)
    held = bases_of(job, batch_layouts([layout])).held(CHOICES["offload"].index(layout.offload))[0]
    fits = one.fits and bool(held)
    return Found((one,) if fits else (), (), 1, int(fits), 1, layout if held else None)


def estimate_of(job: Job, layout: Layout) -> Estimate:
    """Return the estimate of `layout`, as `choose_layout` does of the one that it chooses."""
    return estimate(_timed_job(job), layout)


def unable(job: Job, layout: Layout, *, memory: bool) -> list[str]:
    """Return why this version cannot train `job` with `layout`; `memory`: nor where it does not fit."""
    wrong = problems(job.model, layout, job.cluster, job.batch) or untrained(job, layout)
    if wrong or not memory or alone(job := _timed_job(job), layout).plans:
        return wrong
    need, device = format_bytes(estimate(job, layout).peak_memory), job.cluster.device
    return [f"the layout needs {need} a device, and {device.name} has {format_bytes(usable_memory(device))} usable"]


def _timed_job(job: Job) -> Job:
    return replace(job, cluster=replace(job.cluster, device=timed(job.cluster.device, job.precision.matmul_dtype)))


def trained(job: Job, pinned: Pins) -> Pins:
    """`pinned`, and what this version's trainer leaves no choice about. Raises LayoutError where it cannot train `job`,
    or not as it is pinned."""
    reasons = _settled(untrainable(job, Layout(**pinned)), pinned)
    if reasons:
        raise LayoutError(leading(reasons, pinned))
    return {**TRAINED, **pinned}


def timed(device: Device, dtype: str) -> Device:
    """`device` with some peak FLOP/s where none is known, so that layouts can be compared."""
    if device.peak_flops(dtype):
        return device
    return replace(device, peak=((dtype, SOME_FLOPS), ("float32", SOME_FLOPS)))
