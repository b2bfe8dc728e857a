"""The brief: a plan in about twelve lines. They say whether it fits, how long it takes, how sure this is, what next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kumi.plan.report import Report
from kumi.plan.search.sizing import training_cost
from kumi.plan.uncertainty.intervals import Uncertainty
from kumi.report import phrases
from kumi.report.bottleneck import faster_with_memory, levers, time_limit
from kumi.report.quantities import fullest, gap, used_assumptions
from kumi.report.rollout_lines import length_line, rollout_data, time_line
from kumi.spec.checks import unsupported_by_trainer
from kumi.spec.job import Job
from kumi.units import format_bytes, format_count

# A change of the batch is advised if it saves at least this share of a step.
_WORTH_TRYING = 0.02
# A plan that fits with a smaller probability should leave more memory free.
_SAFE = 0.85
# The tokens whose cost is given if the user names no number.
_EXAMPLE_TOKENS = 1e9


@dataclass(frozen=True)
class Line:
    """A line of the brief: `text` answers what `label` names."""

    label: str
    text: str


def title(job: Job) -> str:
    """Return the model, its size and the machines."""
    return f"{phrases.model_title(job)}, on {phrases.machines(job.cluster)}"


def brief(report: Report, command: str = "") -> list[Line]:
    """Return the lines of the brief; `command`: how to train with this plan, from the command line."""
    lines = [
        Line("batch", _batch(report)),
        Line("layout", _layout(report)),
        Line("time", _time(report)),
        *_rollout(report),
        *_sure(report),
        Line("memory", _memory(report)),
        Line("cost", _cost(report)),
        Line("limit", time_limit(report.best)),
        Line("more memory", _more_memory(report)),
        *_nodes(report),
        Line("runner-up", _runner_up(report)),
        Line("next", _next(report)),
        Line("train", _train(report, command)),
    ]
    return [*lines, *_notes(report)]


def _batch(report: Report) -> str:
    """Return the size of a step, the precision and the trainer."""
    job, best = report.job, report.best
    return (
        f"{format_count(best.tokens_per_step)} tokens per step, sequence length {job.batch.seq_len:,}, "
        f"{job.precision.kind}, trained by {job.engine.name}"
    )


def _layout(report: Report) -> str:
    """Return the chosen layout, and out of how many it was chosen."""
    words = phrases.layout_words(report.best.layout)
    if report.searched <= 1:
        return f"{words}; the only legal one"
    faster = any(other.step_seconds < report.best.step_seconds for other in report.others)
    choice = "the simplest of the fastest" if faster else "the fastest"
    return f"{words}; {choice} among {report.fitting:,} that fit ({report.searched:,} are legal)"


def _time(report: Report) -> str:
    """Return the step time, the speed and the MFU."""
    best = report.best
    return (
        f"{phrases.seconds(best.step_seconds)} per step, {format_count(best.tokens_per_second)} tokens/s "
        f"({best.tokens_per_second_per_device:,.0f} per device), MFU {phrases.percent(best.mfu)}"
    )


def _rollout(report: Report) -> Iterator[Line]:
    """Say how long the parts of a rollout batch take, and which lengths are assumed."""
    data = rollout_data(report.job, report.best)
    if data is not None:
        yield Line("rollout", f"{time_line(data)}; {length_line(data)}")


def _sure(report: Report) -> Iterator[Line]:
    """Say how far the time may be off, and how far it was off for the most similar published run."""
    errors = report.uncertainty
    if errors is None:
        yield Line("error", f"published runs differ by {phrases.percent(report.best.uncertainty)} on average")
        return
    own = f" and {phrases.plural(errors.machine_runs, 'run')} on these machines" if errors.machine_runs else ""
    text = (
        f"80% of such steps take {phrases.interval(errors.time80, phrases.seconds)}, 90% take "
        f"{phrases.interval(errors.time90, phrases.seconds)} (from {errors.experiments} published experiments with "
        f"{phrases.REGIMES.get(errors.regime, errors.regime)}{own})"
    )
    near = next((run for run in errors.nearest if run.time_error is not None), None)
    if near is not None and near.time_error is not None:
        text += (
            f"; nearest: {near.model} on {near.gpus:,} x {near.gpu}, measured {phrases.longer(near.time_error)} than "
            f"estimated"
        )
    yield Line("error", text)
    if errors.extrapolated:
        yield Line("", f"less sure, so these intervals are wider: {errors.extrapolated}")
    if abs(errors.machine_error) > phrases.SMALL_ERROR:
        yield Line("", _unexplained(errors))


def _unexplained(errors: Uncertainty) -> str:
    """Say that the machines' figures do not explain the runs that they were refitted to, and what that means."""
    return (
        f"{phrases.plural(errors.machine_runs, 'run')} on these machines took {phrases.longer(errors.machine_error)} "
        f"than their refitted figures explain, so these intervals cover steps with and without this error; find the "
        f"cause"
    )


def _memory(report: Report) -> str:
    """Say whether the plan fits, with how much to spare, and how sure this is."""
    best, capacity = report.best, report.job.cluster.device.memory
    where = f"on pp rank {fullest(best)}, the fullest" if best.layout.pp > 1 else "per device"
    text = f"{format_bytes(best.peak_memory)} of {format_bytes(capacity)} {where}"
    spare = f"{format_bytes(max(0, capacity - best.peak_memory))} spare"
    host = f"; {format_bytes(best.host_memory)} of host memory per device" if best.host_memory else ""
    if not best.fits:
        over = best.peak_memory - best.usable
        return f"{text}: DOES NOT FIT, {format_bytes(over)} more than the {format_bytes(best.usable)} usable{host}"
    reserve = f"{format_bytes(capacity - best.usable)} of it the margin"
    errors = report.uncertainty
    if errors is None:
        return f"{text}: fits, {spare} ({reserve}){host}"
    return (
        f"{text}: fits, {spare} ({reserve}); it fits with probability {phrases.probability(errors.fits)}, 80% of such "
        f"runs take {phrases.interval(errors.memory80, format_bytes)}{host}"
    )


def _cost(report: Report) -> str:
    """Say how long the requested tokens take and what they cost, with the bounds of the time's 80% interval."""
    best, device, errors = report.best, report.job.cluster.device, report.uncertainty
    totals = report.training or training_cost(_EXAMPLE_TOKENS, best, report.job.cluster)

    def bounds(value: float, unit: str = "") -> str:
        """Format a figure that is proportional to the step time, with the bounds that follow for it."""
        if errors is None:
            return f"{phrases.amount(value)}{unit}"
        low, high = (value * bound / best.step_seconds for bound in (errors.time80.low, errors.time80.high))
        return f"{phrases.amount(value)}{unit} ({phrases.amount(low)} to {phrases.amount(high)})"

    hours = totals.days * 24
    time = bounds(totals.days, " days") if hours >= 48 else bounds(hours, " hours")
    parts = [f"{format_count(totals.tokens)} tokens take {time}", f"{phrases.amount(totals.device_hours)} device hours"]
    if totals.cost is not None:
        parts.append(f"cost {bounds(totals.cost)} at {device.price:g} per device hour")
    if totals.energy is not None:
        parts.append(f"{phrases.amount(totals.energy)} kWh")
    if totals.cost is None:
        parts.append("cost unknown without cluster.price_per_hour")
    return ", ".join(parts) + ("" if report.training else "; other amounts with --tokens N")


def _more_memory(report: Report) -> str:
    """Say whether a layout that needs more memory is faster."""
    faster = faster_with_memory(report)
    if faster is None:
        return "no faster: no layout that was compared is noticeably faster with up to twice the memory"
    more = format_bytes(faster.peak_memory - faster.usable)
    saved = 1 - faster.step_seconds / report.best.step_seconds
    return (
        f"with {more} more per device, {phrases.seconds(faster.step_seconds)} per step, {phrases.percent(saved)} less: "
        f"{phrases.layout_words(faster.layout)}"
    )


def _nodes(report: Report) -> Iterator[Line]:
    """Say how the time of a step changes with the number of nodes."""
    if not report.node_counts:
        return
    best, parts = report.best, []
    for count in report.node_counts:
        nodes = phrases.plural(count.nodes, "node")
        if count.best is None:
            parts.append(f"{nodes}: no such layout fits")
            continue
        speedup = phrases.ratio(best.step_seconds / count.best.step_seconds)
        parts.append(f"{nodes}: {phrases.seconds(count.best.step_seconds)} ({speedup} the speed)")
    same = "pp, tp, cp and ep stay as here, so another layout may be faster"
    yield Line("nodes", f"{'; '.join(parts)}; {same}; other numbers with cluster.nodes=N")


def _runner_up(report: Report) -> str:
    """Return the fastest other layout and how it compares, or why there is none."""
    if not report.others:
        if report.fitting <= 1:
            return f"none: no other layout {'is legal' if report.searched <= 1 else 'fits'}"
        return "none: the other layouts that fit use the same techniques, and none of them is faster"
    other = report.others[0]
    difference = gap(report.best, other)
    share = other.step_seconds / report.best.step_seconds - 1
    noise = ", less than the estimate's error" if difference.noise else ", but less sure" if share < 0 else ""
    return (
        f"{phrases.layout_words(other.layout)}: {phrases.seconds(other.step_seconds)} per step "
        f"({phrases.longer(share)}{noise}), {format_bytes(other.peak_memory)}"
    )


def _next(report: Report) -> str:
    """Return the change that promises most, else what to measure."""
    errors, best = report.uncertainty, report.best
    if errors is not None and errors.fits < _SAFE:
        margin = "auto" if report.job.margin is not None else f"{errors.margin + 0.1:.2g}"
        return (
            f"leave more memory free with plan.margin={margin}, since {phrases.probability(1 - errors.fits)} of such "
            f"plans do not fit"
        )
    batch = next((lever for lever in levers(report) if lever.what == phrases.TWICE_THE_TOKENS), None)
    if batch is not None and batch.seconds >= _WORTH_TRYING * best.step_seconds:
        saved = phrases.percent(batch.seconds / best.step_seconds)
        return (
            f"plan with batch.tokens_per_step={2 * best.tokens_per_step:_} if the training allows it: it saves at most "
            f"{saved} of the time per token"
        )
    if report.others and gap(best, report.others[0]).noise:
        return "measure the layout and the runner-up for 20 steps each, since they differ by less than the error"
    return "measure 20 steps of this plan, then correct the plan with kumi plan --calibrate RUN_FOLDER"


def _train(report: Report, command: str) -> str:
    """Return the command that trains with the plan, or why kumi cannot."""
    reasons = unsupported_by_trainer(report.job, report.best.layout)
    if report.job.engine.name != "kumi":
        return f"with {report.job.engine.name}; --export writes the configuration of another trainer"
    if reasons:
        # No exporter supports adapters.
        export = "" if report.job.model.lora is not None else ", or write another trainer's configuration with --export"
        return f"kumi cannot train this layout ({reasons[0]}); plan with --trainable{export}"
    return command or "kumi plan ... --save run.toml, then kumi train run.toml"


def _notes(report: Report) -> Iterator[Line]:
    """Yield the notes on the model, and the assumed figures of the machines that the estimate rests on."""
    yield from (Line("note", note) for note in report.job.model.notes)
    if report.job.cluster.devices > 1 and not report.job.cluster.links:
        yield Line("note", phrases.NO_LINKS)
    assumed, documents = used_assumptions(report.job.cluster, report.best), phrases.assumed_documents(report.job)
    figures = f"{', '.join(assumed)} (kumi bench measures them)" if assumed else ""
    rows = "each row is one document (set batch.mean_document_tokens, or prepare the data)" if documents else ""
    if figures or rows:
        yield Line("assumed", "; ".join(filter(None, (figures, rows))))
