"""The layout of a run: the pinned fields, and for the others the fastest layout that fits and that kumi can train."""

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
from kumi.plan.search.diagnose import (
    UnsupportedFn,
    accept_supported,
    explain_illegal,
    explain_no_fit,
    explain_small_hosts,
    layout_from_pins,
    summarize_reasons,
)
from kumi.plan.search.fitting import make_candidates
from kumi.plan.search.search_layouts import SearchResult, search
from kumi.spec.checks import illegal, layout_unsupported_by_trainer, unsupported_by_trainer
from kumi.spec.cluster import Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.units import format_bytes

# Fixed unless pinned: without sequence parallelism, tensor parallelism needs more memory for the same traffic.
TRAINER_PINS: Pins = {"sequence_parallel": True}

# Assumed peak FLOP/s of a device without a known peak. Layouts over the data axes differ by traffic and memory only.
_ASSUMED_FLOPS = 1e14


def unsupported_by_kumi(pinned: Pins) -> UnsupportedFn:
    """Return a function that lists why a search must not choose a layout for kumi's own trainer.

    The reasons are those of `layout_unsupported_by_trainer`, and offloading to drives unless the user pins it.
    """

    def reasons(job: Job, layout: Layout) -> list[str]:
        drives = layout.offload.endswith("-nvme") and "offload" not in pinned
        unpinned = [f"offload='{layout.offload}' writes to drives in every step; pin layout.offload to have it"]
        return [*layout_unsupported_by_trainer(job, layout), *(unpinned if drives else [])]

    return reasons


def select_layout(job: Job, pinned: Pins) -> Estimate:
    """Return the estimate of the layout to train `job` with.

    Raise LayoutError with the reasons if no legal and trainable layout agrees with `pinned`, and FitError if none fits.
    """
    reasons = _independent_of_search(layout_unsupported_by_trainer(job, Layout(**pinned)), pinned)
    if reasons:
        raise LayoutError(summarize_reasons(reasons, pinned))
    job = _job_with_peak_flops(job)
    single = fully_pinned_layout(job, pinned)
    if single is not None and (reasons := layout_unsupported_by_trainer(job, single)):
        raise LayoutError(summarize_reasons(reasons, pinned))
    unsupported = unsupported_by_kumi(pinned)
    result = (
        search_single(job, single)
        if single is not None
        else search(job, {**TRAINER_PINS, **pinned}, top=1, front=False, accept=accept_supported(job, unsupported))
    )
    if result.plans:
        return result.plans[0]
    if not result.count:
        raise LayoutError(explain_illegal(job, pinned))
    if result.smallest is not None and (reasons := unsupported(job, result.smallest)):
        raise LayoutError(summarize_reasons(reasons, pinned))
    raise FitError(explain_no_fit(job, pinned, result, TRAINER_PINS))


def _independent_of_search(reasons: Sequence[str], pinned: Pins) -> list[str]:
    """Return the `reasons` that no choice of the search can remove: they name only pinned fields of the layout."""
    free = {field.name for field in fields(Layout)} - set(pinned)
    return [reason for reason in reasons if not free & set(re.findall(r"\b(\w+)=", reason))]


def fully_pinned_layout(job: Job, pinned: Pins) -> Layout | None:
    """Return the layout if the pins determine all of it, which they do if `stage_layers` is among them; else None.

    Fields that a run file does not need to name have their defaults. Raise LayoutError if the layout is illegal.
    """
    if "stage_layers" not in pinned:
        return None
    layout = layout_from_pins(job, pinned)
    reasons = illegal(job.model, layout, job.cluster, job.batch)
    if reasons:
        raise LayoutError(summarize_reasons(reasons, pinned))
    return layout


def search_single(job: Job, layout: Layout) -> SearchResult:
    """Return the result of a search over one layout."""
    result = estimate(job, layout)
    candidates = make_candidates(job, batch_layouts([layout]))
    fits_host = bool(candidates.fits_host(CHOICES["offload"].index(layout.offload))[0])
    fits = result.fits and fits_host
    return SearchResult((result,) if fits else (), (), 1, int(fits), 1, layout if fits_host else None)


def estimate_for_training(job: Job, layout: Layout) -> Estimate:
    """Return the estimate of `layout` as `select_layout` makes it, with an assumed peak for an unknown device."""
    return estimate(_job_with_peak_flops(job), layout)


def training_problems(job: Job, layout: Layout, *, memory: bool) -> list[str]:
    """Return why kumi cannot train `job` with `layout`; with `memory`, also if it does not fit."""
    reasons = illegal(job.model, layout, job.cluster, job.batch) or layout_unsupported_by_trainer(job, layout)
    if reasons or not memory or search_single(job := _job_with_peak_flops(job), layout).plans:
        return reasons
    need, usable = estimate(job, layout).peak_memory, usable_memory(job)
    if need <= usable:
        return [explain_small_hosts(job, layout.offload)]
    name = job.cluster.device.name
    return [f"the layout needs {format_bytes(need)} per device, and {name} has {format_bytes(usable)} usable"]


def _job_with_peak_flops(job: Job) -> Job:
    """Return `job` on devices with an assumed peak, if their peak is not known: see `with_peak_flops`."""
    device = with_peak_flops(job.cluster.device, job.precision.matmul_dtype)
    return replace(job, cluster=replace(job.cluster, device=device))


def trainable_pins(job: Job, pinned: Pins) -> Pins:
    """Return `pinned` and the fields that kumi's trainer fixes.

    Raise LayoutError if the trainer cannot train `job`, or not with these pins.
    """
    reasons = _independent_of_search(unsupported_by_trainer(job, Layout(**pinned)), pinned)
    if reasons:
        raise LayoutError(summarize_reasons(reasons, pinned))
    return {**TRAINER_PINS, **pinned}


def with_peak_flops(device: Device, dtype: str) -> Device:
    """Return `device`, with an assumed peak if it has none for `dtype`, so that layouts can be compared."""
    if device.peak_flops(dtype):
        return device
    return replace(device, peak=((dtype, _ASSUMED_FLOPS), ("float32", _ASSUMED_FLOPS)))
