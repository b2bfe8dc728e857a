"""Which constraint binds a plan, and what more of each resource would buy at most: from the estimate's own numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kumi.plan.types import Estimate
from kumi.report import words
from kumi.report.figures import fullest, memory_kinds, spent, time_kinds, traffic
from kumi.report.report import Report
from kumi.spec.cluster import ClusterSpec
from kumi.units import format_bytes

# How much more of a resource the levers grant.
MORE = 0.1
# A rank this full leaves no room for a layout that holds more.
FULL = 0.9
# A layout must be faster by this part of a step for its lack of memory to matter.
GAIN = 0.03
# Arithmetic binds where it takes at least this part of a step; a kind of memory this large is most of it.
HALF = 0.5
# A kind of time that takes a smaller part of a step is not named.
MINOR = 0.02
# By how much the slowest stage of a pipeline may have more of something than the mean of its stages.
UNEVEN = 0.1
# What saves less of a step than this is not worth a line.
WORTH = 0.002


@dataclass(frozen=True)
class Lever:
    """What more of one resource would save of a step's seconds, at most."""

    what: str
    seconds: float
    why: str


def binding(report: Report) -> list[str]:
    """Sentences: what the step's time goes into, what memory leaves, and what would be faster with more memory."""
    return [_time(report.best), *_memory(report)]


def _time(best: Estimate) -> str:
    arithmetic = spent(best, *words.COMPUTE)
    others = [(kind, value) for kind, value in time_kinds(best) if kind not in words.COMPUTE]
    share = words.percent(arithmetic / best.step_seconds)
    if not others or others[0][1] < MINOR * best.step_seconds:
        return f"Arithmetic binds: forward and backward are {share} of the step."
    kind, value = others[0]
    name, part = words.time_name(kind), words.percent(value / best.step_seconds)
    if value > arithmetic:
        return (
            f"{words.capital(name)} binds: it is {words.seconds(value)} of the {words.seconds(best.step_seconds)} of "
            f"a step ({part}), more than forward and backward together ({share})."
        )
    if arithmetic < HALF * best.step_seconds:
        return (
            f"No one thing binds: forward and backward are {share} of the step, and the largest other part is {name}: "
            f"{words.seconds(value)}, {part}."
        )
    left = words.percent(1 - arithmetic / best.step_seconds)
    return (
        f"Arithmetic binds: forward and backward are {share} of the step. Of the other {left} the largest part is "
        f"{name}: {words.seconds(value)}, {part} of the step."
    )


def _memory(report: Report) -> Iterator[str]:
    best = report.best
    memory = best.memory[fullest(best)]
    kind, value = max(memory_kinds(memory), key=lambda pair: pair[1])
    share = best.peak_memory / best.usable
    lacking = _lacking(report)
    state = "Memory binds too" if share > FULL or lacking else "Memory does not bind"
    need, have = format_bytes(best.peak_memory), format_bytes(best.usable)
    part = "most of it" if value > HALF * memory.total else "the largest part"
    yield (
        f"{state}: {words.holder(best.layout)} needs {need} of the {have} usable ({words.percent(share)}), {part} "
        f"{words.MEMORY[kind]} ({format_bytes(value)})."
    )
    if lacking:
        faster = min(lacking, key=lambda one: one.peak_memory)
        yield (
            f"With {format_bytes(faster.peak_memory - faster.usable)} more on each device, "
            f"{words.layout_words(faster.layout)} would take {words.seconds(faster.step_seconds)} in place of "
            f"{words.seconds(best.step_seconds)}."
        )


def _lacking(report: Report) -> list[Estimate]:
    """What would be faster by more than `GAIN` if it fitted, whether searched for or expected."""
    known = [*report.lacking, *(item.estimate for item in report.expected if item.estimate is not None)]
    return [one for one in known if not one.fits and one.step_seconds < (1 - GAIN) * report.best.step_seconds]


def levers(report: Report) -> list[Lever]:
    """What more of each resource would buy, most first; what would buy next to nothing is left out."""
    best = report.best
    found = [*_compute(best), *_links(report), *_recompute(best), *_batch(report)]
    worth = [lever for lever in found if lever.seconds > WORTH * best.step_seconds]
    return sorted(worth, key=lambda lever: -lever.seconds)


def _compute(best: Estimate) -> Iterator[Lever]:
    """Faster kernels shorten what the pipeline waits for as well."""
    seconds = spent(best, *words.COMPUTE, "recompute", "bubble")
    yield Lever("devices 10% faster at arithmetic", seconds * (1 - 1 / (1 + MORE)), "compute, recomputation, bubble")


def _links(report: Report) -> Iterator[Lever]:
    """A faster link shortens its exposed traffic, by no more than the time that its bytes take, and what a pipeline
    waits for it."""
    rows, waits = traffic(report.job, report.best), _waits(report.best)
    for link in dict.fromkeys(row.link for row in rows):
        own = [row for row in rows if row.link == link]
        saved = waits * sum(min(row.exposed, row.busy * (1 - row.latency) * (1 - 1 / (1 + MORE))) for row in own)
        axes = ", ".join(row.axis for row in own)
        yield Lever(f"10% more bandwidth on {link or 'the link'}", saved, f"exposed traffic of {axes}")


def _recompute(best: Estimate) -> Iterator[Lever]:
    """Whole layers are recomputed with the traffic and the host's pace of their forward pass: at most half of all."""
    if best.layout.recompute != "none":
        again = spent(best, "tp", "cp", "ep", "host") / 2 if best.layout.recompute == "full" else 0.0
        seconds = _waits(best) * (spent(best, "recompute") + again)
        yield Lever("memory enough to recompute nothing", seconds, "the recomputation and its traffic")


def _waits(best: Estimate) -> float:
    """How many times as much a step is shortened by what every microbatch saves: a pipeline's waits grow with it, the
    more where the slowest stage saves more than the mean of all."""
    every = spent(best, *words.COMPUTE, "recompute", "tp", "cp", "ep", "host")
    return 1 + (1 + UNEVEN) * spent(best, "bubble") / every if every else 1.0


def _batch(report: Report) -> Iterator[Lever]:
    """Twice the tokens a step halve, for each token, what happens once a step: filling and draining the pipeline, the
    update with its messages and what moves for it, gradients of DDP and ZeRO-1."""
    best, layout = report.best, report.best.layout
    moved = ["offload"] if layout.offload not in ("none", "activations") else []
    norm = sum(item.seconds for item in best.collectives if item.when == "update")
    once = spent(best, "bubble", "pp", "optimizer", *moved) + (spent(best, "dp") if layout.zero < 2 else norm)
    yield Lever("twice the tokens a step", once / 2, "what is paid once a step, for as many tokens as now")


def links_apart(cluster: ClusterSpec) -> float:
    """How many times the bandwidth inside a node is that between nodes; 1 where there is one link or none."""
    if len(cluster.links) < 2:
        return 1.0
    return cluster.links[0].bandwidth / cluster.links[-1].bandwidth
