"""In words what fits, what the links allow, and why the chosen layout wins: each sentence from the estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kumi.plan.types import Estimate
from kumi.report import words
from kumi.report.binding import links_apart
from kumi.report.figures import Gap, gap, needs, spent
from kumi.report.report import Expected, Report
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params, ops
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import units
from kumi.spec.trainable import untrainable
from kumi.units import format_bytes, format_count

# Traffic that takes more of a step than this makes a link slow for the job.
SLOW, UNSEEN = 0.1, 0.002
# A part of a gap smaller than this is not worth naming.
PAID = 0.1


def advice(report: Report) -> list[str]:
    """The decision in words, each sentence from this job's estimates."""
    parts = (_fit(report), _links(report), _largest(report), _size(report), _why(report), _who(report))
    return [sentence for part in parts for sentence in part]


def _who(report: Report) -> Iterator[str]:
    """Whether kumi itself can train the plan today."""
    reasons = untrainable(report.job, report.best.layout)
    if not reasons:
        return
    # Adapters are exported to no trainer.
    other = "" if report.job.model.lora is not None else "export it to another trainer (--export), or "
    yield (
        f"This version of kumi plans this layout and does not train it ({reasons[0]}): {other}ask for the best that it "
        f"trains (--trainable)."
    )


def verdict(item: Expected, best: Estimate) -> str:
    """What became of an expected layout, in one sentence."""
    if item.estimate is None:
        return f"Refused: {'; '.join(item.problems)}."
    need, have = item.estimate.peak_memory, item.estimate.usable
    if not item.fits:
        who = words.holder(item.estimate.layout)
        return f"Does not fit: {who} needs {format_bytes(need)}, {words.times(need / have)} what is usable."
    if same(item.layout, best.layout):
        return "The chosen layout, up to microbatch and recomputation."
    found = gap(best, item.estimate)
    if item.problems:
        times = words.times(item.estimate.step_seconds / best.step_seconds)
        return f"{times} the time, and ruled out: {'; '.join(item.problems)}."
    if found.seconds <= 0:
        outside = "as fast, within the model's error" if found.noise else "ruled out by what is pinned"
        return f"{words.times(item.estimate.step_seconds / best.step_seconds)} the time: {outside}."
    noise = " (within the model's error)" if found.noise else ""
    return (
        f"{words.times(item.estimate.step_seconds / best.step_seconds)} the time{noise}: {needs(found)} to draw level."
    )


def same(first: Layout, second: Layout) -> bool:
    """Whether two layouts divide the model and its states in the same way."""
    return (first.degrees, first.ep, first.zero, first.offload) == (
        second.degrees,
        second.ep,
        second.zero,
        second.offload,
    )


def _plain(item: Expected) -> bool:
    """Whether every device holds all of the model and its states."""
    layout = item.layout
    return layout.pp * layout.tp * layout.cp * layout.ep == 1 and layout.zero == 0 and layout.offload == "none"


def _sharded(item: Expected) -> bool:
    """Whether all devices share one copy of the states, and nothing else divides the model."""
    layout = item.layout
    return layout.zero == 3 and layout.dp_shard == layout.world_size and layout.offload == "none"


def _find(report: Report, wanted: Callable[[Expected], bool]) -> Estimate | None:
    return next((item.estimate for item in report.expected if wanted(item) and item.estimate is not None), None)


def _fit(report: Report) -> Iterator[str]:
    plain = _find(report, _plain)
    if plain is None:
        return
    need, have = format_bytes(plain.peak_memory), format_bytes(plain.usable)
    whole = "A whole copy of the model and its states"
    if plain.fits:
        yield f"{whole} fits on one device ({need} of {have}): memory forces no division."
        return
    remedy = "states must leave for the host" if report.job.cluster.devices == 1 else "states must be divided"
    factor = words.times(plain.peak_memory / plain.usable)
    yield f"{whole} needs {need} on each device, {factor} the {have} usable: {remedy}."


def _links(report: Report) -> Iterator[str]:
    cluster, sharded = report.job.cluster, _find(report, _sharded)
    if not cluster.links or cluster.devices == 1:
        return
    inner, outer = cluster.links[0], cluster.links[-1]
    said = f"Devices are joined by {inner.name}, {words.rate(inner.bandwidth)} each"
    if len(cluster.links) > 1:
        said = (
            f"A device has {words.rate(inner.bandwidth)} to its neighbours in the node ({inner.name}) and "
            f"{words.rate(outer.bandwidth)} to the furthest ({outer.name}), {words.times(links_apart(cluster))} less"
        )
    if sharded is None:
        yield f"{said}."
        return
    lost = spent(sharded, "dp") / sharded.step_seconds
    speed = "slow" if lost > SLOW else "fast enough"
    wait = f"would wait for it {words.percent(lost)} of a step" if lost > UNSEEN else "would hide what it sends"
    yield f"{said}. FSDP over all devices {wait}: {speed} for this job."


def _largest(report: Report) -> Iterator[str]:
    """The largest piece that is gathered as one, of which two are whole at a time under ZeRO-3."""
    job = report.job
    size = 2 * ITEMSIZE[job.precision.compute] * _largest_unit(job.model)
    if size > report.best.usable:
        yield (
            f"The largest layer does not fit: two at a time, gathered, are {format_bytes(size)} of the "
            f"{format_bytes(report.best.usable)} usable, so that it must be cut itself (tp, ep), not only its states."
        )


def _largest_unit(model: ModelSpec) -> int:
    """Parameters of the largest FSDP unit."""
    return max(sum(param.numel for param in unit.params) for unit in units(ops(model)))


def _size(report: Report) -> Iterator[str]:
    """The field's rule by size against the estimates."""
    count = num_params(report.job.model)
    if report.job.cluster.devices == 1 or 70e9 < count <= 100e9:
        return
    name, wanted = (
        ("DDP", _plain) if count <= 10e9 else ("FSDP", _sharded) if count <= 70e9 else ("3D parallelism", _cut)
    )
    item = next((item for item in report.expected if wanted(item)), None)
    if item is not None:
        yield (
            f"The field's rule by size (DDP up to 10B parameters, FSDP up to 70B, 3D parallelism above 100B) says "
            f"{name} for {format_count(count)}. {item.title}: {_lower(verdict(item, report.best))}"
        )


def _cut(item: Expected) -> bool:
    return item.layout.tp * item.layout.pp > 1 and item.layout.zero <= 1


def _why(report: Report) -> Iterator[str]:
    """The chosen layout against the best of those one would have tried."""
    best = report.best
    known = [item for item in report.expected if item.fits and not item.problems]
    rivals = [(item, gap(best, item.estimate)) for item in known if item.estimate is not None]
    if not rivals:
        if report.expected and best.fits:
            yield "None of the layouts that one might have tried first can run; the chosen one can."
        return
    item, found = min(rivals, key=lambda pair: pair[1].seconds)
    if same(item.layout, best.layout):
        yield f"The choice is what the field would take: {item.title}."
    elif found.seconds <= 0 and not found.noise:
        yield (
            f"{item.title} would take {words.seconds(found.other.step_seconds)} in place of "
            f"{words.seconds(best.step_seconds)}; what is pinned rules it out."
        )
    elif found.noise:
        side = f"{words.seconds(found.seconds)} a step behind" if found.seconds > 0 else "as fast"
        yield (
            f"{item.title} is {side}, within the model's error of {words.percent(best.uncertainty)}: take whichever is "
            f"simpler to run, or measure both."
        )
    else:
        yield f"Of what one might have tried first, {item.title} comes closest. {_terms(best, found)}"


def _terms(best: Estimate, found: Gap) -> str:
    """What a slower layout loses and gains in time against the chosen one."""
    theirs = dict(found.other.time)
    paid = [(kind, value - theirs.get(kind, 0.0)) for kind, value in best.time]
    paid = [pair for pair in sorted(paid, key=lambda pair: -pair[1]) if pair[1] > PAID * found.seconds][:2]
    losses = [pair for pair in found.losses[:2] if pair[1] > PAID * found.seconds]
    lost = " and ".join(f"{words.seconds(value)} of {words.time_name(kind)}" for kind, value in losses)
    price = " and ".join(f"{words.seconds(value)} of {words.time_name(kind)}" for kind, value in paid)
    return f"The chosen one saves {lost}{', and pays ' + price + ' for it' if price else ''}."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
