"""The headline of a report: the job, the chosen layout, its speed, memory and cost in a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from kumi.plan.estimates import Estimate
from kumi.plan.report import Report
from kumi.plan.search.sizing import training_cost
from kumi.report import phrases
from kumi.report.quantities import fullest, used_assumptions
from kumi.units import format_bytes, format_count


def headline(report: Report) -> list[str]:
    """Return the first lines of the report: job, layout, number of layouts searched, speed, memory, cost, notes."""
    job, best = report.job, report.best
    layout = best.layout
    batch = f"{format_count(best.tokens_per_step)} tokens per step, sequence length {job.batch.seq_len:,}"
    speed = f"{format_count(best.tokens_per_second)} tokens/s ({best.tokens_per_second_per_device:,.0f} per device)"
    step = f"{phrases.seconds(best.step_seconds)} per step, {_error(report)}"
    capacity = format_bytes(job.cluster.device.memory)
    where = f", on pp rank {fullest(best)} (the fullest)" if layout.pp > 1 else ""
    fits = "" if best.fits else ": DOES NOT FIT"
    counts = f"; {phrases.plural(report.searched, 'legal layout')} searched, {report.fitting:,} fit"
    searched = counts if report.searched else ""
    lines = [
        f"{phrases.model_title(job)}, on {phrases.machines(job.cluster)}; {batch}; {job.precision.kind}; trained by "
        f"{job.engine.name}",
        phrases.arrangement(layout),
        f"{phrases.details(layout)}, {phrases.plural(job.batch.microbatches(layout), 'microbatch')} per step{searched}",
        f"{speed}; {step}",
        f"MFU {phrases.percent(best.mfu)} ({phrases.counted_flops(job)})",
        f"memory {format_bytes(best.peak_memory)} of {format_bytes(best.usable)} usable ({capacity} device)"
        f"{where}{fits}",
    ]
    return [*lines, *_host(best), *_cost(report), *_remarks(report)]


def _error(report: Report) -> str:
    """Return the interval of the step time, or the planner's mean error."""
    if report.uncertainty is None:
        return f"+/- {phrases.percent(report.best.uncertainty)}"
    return f"80% within {phrases.interval(report.uncertainty.time80, phrases.seconds)}"


def _remarks(report: Report) -> Iterator[str]:
    """Yield the notes on the model, and the figures of the machines that are assumptions."""
    yield from (f"note: {note}" for note in report.job.model.notes)
    if report.job.cluster.devices > 1 and not report.job.cluster.links:
        yield f"note: {phrases.NO_LINKS}"
    documents = phrases.assumed_documents(report.job)
    if documents:
        yield documents
    assumed = used_assumptions(report.job.cluster, report.best)
    if assumed:
        yield f"assumed, not measured: {'; '.join(assumed)}"


def _host(best: Estimate) -> Iterator[str]:
    if best.host_memory:
        yield f"host memory {format_bytes(best.host_memory)} per device"


def _cost(report: Report) -> Iterator[str]:
    """Yield the device hours, cost and energy of the requested tokens, by default a billion."""
    device = report.job.cluster.device
    totals = report.training or training_cost(1e9, report.best, report.job.cluster)
    days = f"{phrases.digits(totals.days)} days, " if report.training else ""
    parts = [f"{phrases.digits(totals.device_hours)} device hours"]
    if totals.cost is not None:
        parts.append(f"{phrases.digits(totals.cost)} at {device.price:g} per device hour")
    if totals.energy is not None:
        parts.append(f"{phrases.digits(totals.energy)} kWh at {device.watts:g} W per device")
    unpriced = "; set cluster.price_per_hour to see the cost" if report.training and totals.cost is None else ""
    yield f"{_tokens(totals.tokens)} take {days}{', '.join(parts)}{unpriced}"


def _tokens(tokens: float) -> str:
    return "a billion tokens" if tokens == 1e9 else f"{format_count(tokens)} tokens"
