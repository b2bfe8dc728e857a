"""Sentences that explain the choice: whether a replica fits, whether the links are fast enough, why the layout wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from kumi.plan.estimates import Estimate
from kumi.plan.report import Report, StandardLayout
from kumi.report import phrases
from kumi.report.bottleneck import bandwidth_ratio
from kumi.report.quantities import Gap, gap, savings_needed, seconds_spent
from kumi.spec.checks import unsupported_by_trainer
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params, ops
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import fsdp_units
from kumi.units import format_bytes, format_count

# A network is slow for the job above the first share of a step in exposed communication, and hidden below the second.
SLOW, HIDDEN = 0.1, 0.002
# Only kinds of time that differ by more than this share of the difference of two step times are named.
NAMED = 0.1


def advice(report: Report) -> list[str]:
    """Return the sentences that explain the choice, computed from the estimates of this job."""
    parts = (_fit(report), _links(report), _largest(report), _size(report), _why(report), _trainer(report))
    return [sentence for part in parts for sentence in part]


def _trainer(report: Report) -> Iterator[str]:
    """Say why this version of kumi cannot train the plan, if it cannot."""
    reasons = unsupported_by_trainer(report.job, report.best.layout)
    if not reasons:
        return
    # No exporter supports adapters.
    export = "" if report.job.model.lora is not None else "export it to another trainer (--export), or "
    yield (
        f"This version of kumi can plan this layout but not train it ({reasons[0]}): {export}search only layouts that "
        f"kumi trains (--trainable)."
    )


def verdict(item: StandardLayout, best: Estimate) -> str:
    """Return one sentence that compares a standard layout with the chosen one."""
    if item.estimate is None:
        return f"Refused: {'; '.join(item.problems)}."
    need, have = item.estimate.peak_memory, item.estimate.usable
    if not item.fits:
        holder = phrases.holder(item.estimate.layout)
        return f"Does not fit: {holder} needs {format_bytes(need)}, {phrases.times(need / have)} the usable memory."
    if same_sharding(item.layout, best.layout):
        return "The chosen layout; only microbatch and recomputation may differ."
    difference = gap(best, item.estimate)
    times = phrases.times(item.estimate.step_seconds / best.step_seconds)
    if item.problems:
        return f"{times} the time, but not supported: {'; '.join(item.problems)}."
    if difference.seconds <= 0:
        reason = "as fast, within the model's error" if difference.noise else "ruled out by the pinned fields"
        return f"{times} the time: {reason}."
    noise = " (within the model's error)" if difference.noise else ""
    return f"{times} the time{noise}: needs {savings_needed(difference)} to match."


def same_sharding(first: Layout, second: Layout) -> bool:
    """Return True if two layouts shard the model and its states in the same way."""
    return (first.degrees, first.ep, first.zero, first.offload) == (
        second.degrees,
        second.ep,
        second.zero,
        second.offload,
    )


def _is_replicated(item: StandardLayout) -> bool:
    """Return True if every device holds a full replica of the model and its states."""
    layout = item.layout
    return layout.pp * layout.tp * layout.cp * layout.ep == 1 and layout.zero == 0 and layout.offload == "none"


def _is_fsdp(item: StandardLayout) -> bool:
    """Return True if the layout is FSDP (ZeRO-3) over all devices, without offloading."""
    layout = item.layout
    return layout.zero == 3 and layout.dp_shard == layout.world_size and layout.offload == "none"


def _find(report: Report, accepts: Callable[[StandardLayout], bool]) -> Estimate | None:
    return next((item.estimate for item in report.expected if accepts(item) and item.estimate is not None), None)


def _fit(report: Report) -> Iterator[str]:
    """Say whether a full replica of the model and its states fits on one device."""
    replicated = _find(report, _is_replicated)
    if replicated is None:
        return
    need, have = format_bytes(replicated.peak_memory), format_bytes(replicated.usable)
    replica = "A full replica of the model and its states"
    if replicated.fits:
        yield f"{replica} fits on one device ({need} of {have} usable): memory does not require sharding."
        return
    remedy = "offloaded to the host" if report.job.cluster.devices == 1 else "sharded"
    factor = phrases.times(replicated.peak_memory / replicated.usable)
    yield f"{replica} needs {need} per device, {factor} the {have} usable: the states must be {remedy}."


def _links(report: Report) -> Iterator[str]:
    """State the bandwidth of the links, and whether they are fast enough for FSDP over all devices."""
    cluster, fsdp = report.job.cluster, _find(report, _is_fsdp)
    if not cluster.links or cluster.devices == 1:
        return
    inner, outer = cluster.links[0], cluster.links[-1]
    bandwidth = f"Devices are connected by {inner.name}, {phrases.rate(inner.bandwidth)} each"
    if len(cluster.links) > 1:
        bandwidth = (
            f"Each device has {phrases.rate(inner.bandwidth)} inside its node ({inner.name}) and "
            f"{phrases.rate(outer.bandwidth)} to the most distant devices ({outer.name}), "
            f"{phrases.times(bandwidth_ratio(cluster))} less"
        )
    if fsdp is None:
        yield f"{bandwidth}."
        return
    exposed = seconds_spent(fsdp, "dp") / fsdp.step_seconds
    speed = "slow" if exposed > SLOW else "fast enough"
    wait = (
        f"would wait for communication for {phrases.percent(exposed)} of the step"
        if exposed > HIDDEN
        else "would hide its communication behind compute"
    )
    yield f"{bandwidth}. FSDP over all devices {wait}: the network is {speed} for this job."


def _largest(report: Report) -> Iterator[str]:
    """Say so if two unsharded copies of the largest FSDP unit do not fit: ZeRO-3 holds two units at a time."""
    job = report.job
    size = 2 * ITEMSIZE[job.precision.compute] * _largest_unit(job.model)
    if size > report.best.usable:
        yield (
            f"The largest layer does not fit: ZeRO-3 gathers two layers at a time, {format_bytes(size)}, and "
            f"{format_bytes(report.best.usable)} are usable; split its matrices (tp, ep), too."
        )


def _largest_unit(model: ModelSpec) -> int:
    """Parameters of the largest FSDP unit."""
    return max(sum(param.numel for param in unit.params) for unit in fsdp_units(ops(model)))


def _size(report: Report) -> Iterator[str]:
    """Compare the field's rule of thumb by model size with its estimate."""
    count = num_params(report.job.model)
    if report.job.cluster.devices == 1 or 70e9 < count <= 100e9:
        return
    sizes = ((10e9, "DDP", _is_replicated), (70e9, "FSDP", _is_fsdp), (math.inf, "3D parallelism", _is_three_d))
    name, accepts = next((name, accepts) for most, name, accepts in sizes if count <= most)
    item = next((item for item in report.expected if accepts(item)), None)
    if item is not None:
        yield (
            f"The rule of thumb by size (DDP up to 10B parameters, FSDP up to 70B, 3D parallelism above 100B) suggests "
            f"{name} for {format_count(count)}. {item.title}: {_lower(verdict(item, report.best))}"
        )


def _is_three_d(item: StandardLayout) -> bool:
    """Return True if the layout has tensor or pipeline parallelism and at most ZeRO-1."""
    return item.layout.tp * item.layout.pp > 1 and item.layout.zero <= 1


def _why(report: Report) -> Iterator[str]:
    """Compare the chosen layout with the fastest standard one that fits and is supported."""
    best = report.best
    runnable = [item for item in report.expected if item.fits and not item.problems]
    rivals = [(item, gap(best, item.estimate)) for item in runnable if item.estimate is not None]
    if not rivals:
        yield from _none_runs(report)
        return
    item, difference = min(rivals, key=lambda pair: pair[1].seconds)
    if same_sharding(item.layout, best.layout):
        yield f"The choice is a standard layout: {item.title}."
    elif difference.seconds <= 0 and not difference.noise:
        yield (
            f"{item.title} would take {phrases.seconds(difference.other.step_seconds)} per step instead of "
            f"{phrases.seconds(best.step_seconds)}; the pinned fields rule it out."
        )
    elif difference.noise:
        speed = f"{phrases.seconds(difference.seconds)} per step slower" if difference.seconds > 0 else "as fast"
        yield (
            f"{item.title} is {speed}, within the model's error of {phrases.percent(best.uncertainty)}: take the one "
            f"that is simpler to run, or measure both."
        )
    else:
        yield f"Of the standard layouts, {item.title} comes closest. {_tradeoff(best, difference)}"


def _none_runs(report: Report) -> Iterator[str]:
    """Say that the chosen layout runs and no standard one does, unless it is itself one of them."""
    names = [item.title for item in report.expected if same_sharding(item.layout, report.best.layout)]
    if report.expected and report.best.fits and not names:
        yield "None of the standard layouts can run here; the chosen one can."


def _tradeoff(best: Estimate, difference: Gap) -> str:
    """Return the kinds of time that the chosen layout saves and those that it spends more on, at most two each."""
    theirs = dict(difference.other.time)
    extra = [(kind, value - theirs.get(kind, 0.0)) for kind, value in best.time]
    extra = [pair for pair in sorted(extra, key=lambda pair: -pair[1]) if pair[1] > NAMED * difference.seconds][:2]
    losses = [pair for pair in difference.losses[:2] if pair[1] > NAMED * difference.seconds]
    saved = " and ".join(f"{phrases.seconds(value)} of {phrases.time_name(kind)}" for kind, value in losses)
    cost = " and ".join(f"{phrases.seconds(value)} of {phrases.time_name(kind)}" for kind, value in extra)
    return f"The chosen layout saves {saved}{' at the cost of ' + cost if cost else ''}."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
