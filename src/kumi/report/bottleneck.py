"""The bottleneck of a plan, and upper bounds on the time that more of each resource would save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kumi.plan.estimates import Estimate
from kumi.plan.report import Report
from kumi.report import phrases
from kumi.report.quantities import fullest, memory_kinds, seconds_spent, time_kinds, traffic
from kumi.spec.cluster import ClusterSpec
from kumi.units import format_bytes

# Levers assume this much more FLOP/s or bandwidth.
MORE = 0.1
# Memory is a limit if the fullest rank uses a larger share of the usable bytes than this.
FULL = 0.9
# Memory is also a limit if a layout that does not fit would save at least this share of a step.
GAIN = 0.03
# A layout that needs more than this multiple of the memory is not advised: hardly any device has that much more.
MEMORY_FACTOR = 2.0
# The share from which on compute is the bottleneck of a step, or one kind is "most" of the memory.
HALF = 0.5
# A kind of time with a smaller share of the step is not named.
MINOR = 0.02
# Assumed excess of the slowest pipeline stage over the mean of the stages.
STAGE_IMBALANCE = 0.1
# Levers that save a smaller share of a step are left out.
WORTH = 0.002


@dataclass(frozen=True)
class Lever:
    """An upper bound on the `seconds` that the change `what` saves per step; `why` lists the costs it reduces."""

    what: str
    seconds: float
    why: str


def bottlenecks(report: Report) -> list[str]:
    """Return sentences on the bottleneck of time, on the use of memory, and on a faster layout that does not fit."""
    return [time_limit(report.best), *_memory(report)]


def time_limit(best: Estimate) -> str:
    """Return what takes most of a step: compute, another kind of time, or nothing by itself."""
    compute = seconds_spent(best, *phrases.COMPUTE)
    others = [(kind, value) for kind, value in time_kinds(best) if kind not in phrases.COMPUTE]
    compute_share = phrases.percent(compute / best.step_seconds)
    if not others or others[0][1] < MINOR * best.step_seconds:
        return f"Compute-bound: forward and backward take {compute_share} of the step."
    kind, value = others[0]
    name, share = phrases.time_name(kind), phrases.percent(value / best.step_seconds)
    if value > compute:
        return (
            f"{phrases.capital(name)} is the bottleneck: it takes {phrases.seconds(value)} of the "
            f"{phrases.seconds(best.step_seconds)} step ({share}), more than forward and backward together "
            f"({compute_share})."
        )
    if compute < HALF * best.step_seconds:
        return (
            f"No single bottleneck: forward and backward take {compute_share} of the step, and the largest other part "
            f"is {name}: {phrases.seconds(value)}, {share}."
        )
    return (
        f"Compute-bound: forward and backward take {compute_share} of the step. The largest other part is {name}: "
        f"{phrases.seconds(value)}, {share} of the step."
    )


def _memory(report: Report) -> Iterator[str]:
    """Say whether memory is a limit, and how fast a layout with more of it would be."""
    best = report.best
    memory = best.memory[fullest(best)]
    kind, value = max(memory_kinds(memory), key=lambda pair: pair[1])
    share = best.peak_memory / best.usable
    faster = faster_with_memory(report)
    need, have = format_bytes(best.peak_memory), format_bytes(best.usable)
    limit = _memory_verdict(share, faster is not None)
    part = "most of it is" if value > HALF * memory.total else "the largest part is"
    yield (
        f"{limit}: {phrases.holder(best.layout)} needs {need} of the {have} usable ({phrases.percent(share)}); "
        f"{part} {phrases.MEMORY[kind]} ({format_bytes(value)})."
    )
    if faster is not None:
        yield (
            f"With {format_bytes(faster.peak_memory - faster.usable)} more memory per device, "
            f"{phrases.layout_words(faster.layout)} would take {phrases.seconds(faster.step_seconds)} per step "
            f"instead of {phrases.seconds(best.step_seconds)}."
        )


def _memory_verdict(share: float, keeps_out: bool) -> str:
    """Return whether memory is a limit; `share`: of the usable bytes. `keeps_out`: a faster layout does not fit."""
    if share > FULL:
        return "Memory is nearly full" if share <= 1 else "Memory is too small"
    return "Memory has room, but not for a faster layout" if keeps_out else "Memory is not a limit"


def faster_with_memory(report: Report) -> Estimate | None:
    """Return the smallest layout that does not fit and would save more than `GAIN` of a step; None if there is none.

    Layouts that would not fit with `MEMORY_FACTOR` times the memory are left out.
    Searched and standard layouts are compared. A standard layout that the requested trainer does not support
    is left out.
    """
    standard = (item.estimate for item in report.expected if item.estimate is not None and not item.problems)
    limit = (1 - GAIN) * report.best.step_seconds
    candidates = [item for item in (*report.lacking, *standard) if not item.fits and item.step_seconds < limit]
    reachable = [item for item in candidates if item.peak_memory <= MEMORY_FACTOR * item.usable]
    return min(reachable, key=lambda item: item.peak_memory, default=None)


def levers(report: Report) -> list[Lever]:
    """Return the changes that would save a noticeable share of a step, largest first."""
    best = report.best
    candidates = [*_compute(best), *_links(report), *_recompute(best), *_batch(report)]
    worth = [lever for lever in candidates if lever.seconds > WORTH * best.step_seconds]
    return sorted(worth, key=lambda lever: -lever.seconds)


def _compute(best: Estimate) -> Iterator[Lever]:
    """Yield the saving of faster devices; the pipeline bubble shrinks with the compute."""
    seconds = seconds_spent(best, *phrases.COMPUTE, "recompute", "passes", "bubble")
    yield Lever("devices with 10% more FLOP/s", seconds * (1 - 1 / (1 + MORE)), "compute, recomputation, bubble")


def _links(report: Report) -> Iterator[Lever]:
    """Yield the saving of more bandwidth on each link: the seconds that its bytes take less, at most the exposed
    ones."""
    rows, amplification = traffic(report.job, report.best), _bubble_amplification(report.best)
    for link in dict.fromkeys(row.link for row in rows):
        on_link = [row for row in rows if row.link == link]
        saved = sum(min(row.exposed, row.busy * (1 - row.latency) * (1 - 1 / (1 + MORE))) for row in on_link)
        axes = ", ".join(row.axis for row in on_link)
        yield Lever(
            f"10% more bandwidth on {link or 'the link'}", amplification * saved, f"exposed communication of {axes}"
        )


def _recompute(best: Estimate) -> Iterator[Lever]:
    """Yield the saving of no recomputation.

    Full recomputation also repeats the communication and the launches of the forward pass: at most half of their sum.
    """
    if best.layout.recompute != "none":
        repeated = seconds_spent(best, "tp", "cp", "ep", "host") / 2 if best.layout.recompute == "full" else 0.0
        seconds = _bubble_amplification(best) * (seconds_spent(best, "recompute") + repeated)
        yield Lever("enough memory to recompute nothing", seconds, "recomputation and its communication")


def _bubble_amplification(best: Estimate) -> float:
    """Return the seconds that a step saves per second saved in its microbatches.

    The pipeline bubble shrinks in proportion, and more if the slowest stage saves more than the mean.
    """
    microbatches = seconds_spent(best, *phrases.COMPUTE, "recompute", "tp", "cp", "ep", "host")
    return 1 + (1 + STAGE_IMBALANCE) * seconds_spent(best, "bubble") / microbatches if microbatches else 1.0


def _batch(report: Report) -> Iterator[Lever]:
    """Yield the saving of twice the tokens per step, counted for as many tokens as a step has now.

    It halves, per token, the costs paid once per step: pipeline fill and drain, the optimizer update with its
    messages and transfers, and the gradient reduction of DDP and ZeRO-1.
    """
    best, layout = report.best, report.best.layout
    transfers = ["offload"] if layout.offload not in ("none", "activations") else []
    update = sum(item.seconds for item in best.collectives if item.when == "update")
    once = seconds_spent(best, "bubble", "pp", "optimizer", *transfers) + (
        seconds_spent(best, "dp") if layout.zero < 2 else update
    )
    yield Lever(phrases.TWICE_THE_TOKENS, once / 2, "costs paid once per step, per token")


def bandwidth_ratio(cluster: ClusterSpec) -> float:
    """Return the bandwidth inside a node divided by that between nodes; 1 with at most one link."""
    if len(cluster.links) < 2:
        return 1.0
    return cluster.links[0].bandwidth / cluster.links[-1].bandwidth
