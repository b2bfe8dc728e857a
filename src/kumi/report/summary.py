"""A plan in a few lines: what is planned, the layout, its speed, its memory."""

from __future__ import annotations

from collections.abc import Iterator

from kumi.plan.sizing import training
from kumi.plan.types import Estimate
from kumi.report import words
from kumi.report.figures import fullest
from kumi.report.report import Report
from kumi.spec.ledger import num_params
from kumi.units import format_bytes, format_count


def headline(report: Report) -> list[str]:
    """What is planned, the layout, its speed, its memory, and out of how many it was chosen."""
    job, best = report.job, report.best
    layout = best.layout
    batch = f"{format_count(best.tokens_per_step)} tokens a step in sequences of {job.batch.seq_len:,}"
    speed = f"{format_count(best.tokens_per_second)} tokens/s, {best.tokens_per_second_per_device:,.0f} a device"
    step = f"{words.seconds(best.step_seconds)} a step, give or take {words.percent(best.uncertainty)}"
    card = format_bytes(job.cluster.device.memory)
    where = f", on pp rank {fullest(best)}, the fullest" if layout.pp > 1 else ""
    fits = "" if best.fits else ": DOES NOT FIT"
    looked = f"; {words.plural(report.searched, 'legal layout')} looked at, {report.fitting:,} fit"
    searched = looked if report.searched else ""
    model = f"{job.model.family} of {format_count(num_params(job.model))} parameters"
    lines = [
        f"{model} on {words.machines(job.cluster)}, {batch}, {job.precision.kind}, run by {job.engine.name}",
        words.arrangement(layout),
        f"{words.details(layout)}, {words.plural(job.batch.microbatches(layout), 'microbatch')} a step{searched}",
        f"{speed}; {step}",
        f"MFU {words.percent(best.mfu)} ({words.MFU})",
        f"memory {format_bytes(best.peak_memory)} of {format_bytes(best.usable)} usable on a card of {card}"
        f"{where}{fits}",
    ]
    return [*lines, *_host(best), *_cost(report), *_remarks(report)]


def _remarks(report: Report) -> Iterator[str]:
    """What was left out when the model was read, and which figures of the machines are assumptions."""
    yield from (f"note: {note}" for note in report.job.model.notes)
    if report.job.cluster.devices > 1 and not report.job.cluster.links:
        yield "note: the cluster's description has no links, so that all traffic is taken to cost nothing"
    assumed = report.job.cluster.assumed
    if assumed:
        yield f"assumed, not measured: {'; '.join(assumed)}"


def _host(best: Estimate) -> Iterator[str]:
    if best.host_memory:
        yield f"{format_bytes(best.host_memory)} of the host's memory for each device"


def _cost(report: Report) -> Iterator[str]:
    """What the tokens that were asked for cost, or a billion, in device hours, money and energy, as far as known."""
    device = report.job.cluster.device
    takes = report.training or training(1e9, report.best, report.job.cluster)
    days = f"{words.digits(takes.days)} days, " if report.training else ""
    parts = [f"{words.digits(takes.device_hours)} device hours"]
    if takes.cost is not None:
        parts.append(f"{words.digits(takes.cost)} at {device.price:g} an hour")
    if takes.energy is not None:
        parts.append(f"{words.digits(takes.energy)} kWh at {device.watts:g} W")
    unpriced = "; for the cost, set cluster.price_per_hour" if report.training and takes.cost is None else ""
    yield f"{_tokens(takes.tokens)} take {days}{', '.join(parts)}{unpriced}"


def _tokens(tokens: float) -> str:
    return "a billion tokens" if tokens == 1e9 else f"{format_count(tokens)} tokens"
