"""Two pictures with two axes: what every pipeline rank does when, and the choices by time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, hypot, log10, pi, sin

from kumi.plan import palette, svg, words
from kumi.plan.figures import pick
from kumi.plan.report import Report
from kumi.plan.timeline import Span, Timeline
from kumi.plan.types import Estimate

GIB = 2.0**30
# Actions that are drawn at most: more than these are too thin to see, and make a page heavy.
SPANS = 2400
LANE = 22.0
ACTIONS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
# From this ratio on an axis is logarithmic.
LOGARITHMIC = 8.0


def timelines(found: Timeline) -> dict[str, str]:
    """The timeline of the step, and where its boxes are too narrow for their numbers, of its beginning larger."""
    shortest = min(span.end - span.start for rank in found.spans for span in rank if span.end > span.start)
    wide = svg.width_of("000", 10) + 2
    drawn = {"timeline": timeline(found, "timeline", _window(found))}
    close = (svg.RIGHT - 70) / wide * shortest
    if close < 0.8 * found.seconds:
        drawn["timeline-start"] = timeline(found, "timeline-start", min(found.seconds, 1.5 * close))
    return drawn


def timeline(found: Timeline, name: str, until: float) -> str:
    """A lane for every pipeline rank, a box with its microbatch's number for every action; gaps are the bubble."""
    ranks = pick(len(found.spans), 32, 0)
    left = 14 + svg.width_of(f"rank {ranks[-1]}")
    scale = (svg.RIGHT - left) / until
    drawn = [(rank, span) for rank in ranks for span in found.spans[rank] if span.start < until]
    kinds = [kind for kind in ACTIONS if any(span.action.kind == kind for _, span in drawn)]
    first = {rank: min(span.action.stage for span in found.spans[rank]) for rank in ranks}
    marks, top = _key(kinds, any(span.action.stage != first[rank] for rank, span in drawn))
    for lane, rank in enumerate(ranks):
        y = top + LANE * lane
        marks.append(svg.text(left - 8, y + 15, f"rank {rank}", anchor="end"))
        for span in (span for at, span in drawn if at == rank):
            x, width = left + scale * span.start, scale * (min(span.end, until) - span.start)
            marks += _box(span, x, y, width, span.action.stage != first[rank])
    bottom = top + LANE * len(ranks)
    marks += _clock(left, top, bottom, scale, until)
    part = "" if until >= found.seconds else f", of which the first {words.seconds(until)} are shown"
    waiting = words.percent(sum(found.idle) / found.seconds / len(found.idle))
    said = (
        f"What {len(found.spans)} pipeline ranks do in the {words.seconds(found.seconds)} of a step's "
        f"microbatches{part}. They wait {waiting} of the time on average."
    )
    return svg.picture(name, "Pipeline timeline", said, bottom + 28, marks)


def _window(found: Timeline) -> float:
    """Seconds that are drawn: all of them, or as many as hold about `SPANS` actions."""
    starts = sorted(span.start for rank in found.spans for span in rank)
    return found.seconds if len(starts) <= SPANS else starts[SPANS]


def _key(kinds: Sequence[str], later: bool) -> tuple[list[str], float]:
    entries = [(ACTIONS[kind], palette.ACTION_COLOURS[kind], kind == "W") for kind in kinds]
    marks, end = svg.legend([*entries, *([("underlined: a rank's later stages", "", False)] if later else [])])
    return marks, end + 8


def _box(span: Span, x: float, y: float, width: float, later: bool) -> Iterator[str]:
    kind, stage, microbatch = span.action
    fill = palette.ACTION_COLOURS[kind]
    hint = f"{ACTIONS[kind]}, stage {stage}, microbatch {microbatch}"
    yield svg.rect(x, y + 2, width, LANE - 4, fill, hatched=kind == "W", hint=hint, apart=True)
    if later:
        yield svg.rect(x, y + LANE - 5, width, 3, svg.INK)
    label = str(microbatch)
    if kind != "W" and svg.width_of(label, 10) + 2 < width:
        yield svg.text(x + width / 2, y + 14, label, anchor="middle", size=10, fill=svg.on(fill))


def _clock(left: float, top: float, bottom: float, scale: float, until: float) -> Iterator[str]:
    unit, factor = ("s", 1.0) if until >= 1 else ("ms", 1e3)
    values = svg.ticks(until * factor)
    for value in values:
        x = left + scale * value / factor
        yield svg.line(x, top, x, bottom, opacity=0.15)
        said = f"{value:g}{' ' + unit if value == values[-1] else ''}"
        yield svg.text(min(x, svg.RIGHT), bottom + 17, said, anchor="end" if x > svg.RIGHT - 20 else "middle")


@dataclass(frozen=True)
class Scale:
    """Where values from `low` to `high` lie between `start` and `end`, by their logarithm where they span far."""

    low: float
    high: float
    start: float
    end: float

    @property
    def logarithmic(self) -> bool:
        return self.high > LOGARITHMIC * self.low

    def __call__(self, value: float) -> float:
        low, high = (log10(self.low), log10(self.high)) if self.logarithmic else (self.low, self.high)
        at = log10(value) if self.logarithmic else value
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, inside the scale."""
        if not self.logarithmic:
            return [value for value in svg.ticks(self.high, 10) if value >= self.low]
        powers = range(int(log10(self.low)) - 1, int(log10(self.high)) + 2)
        values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        return [value for value in values if self.low <= value <= self.high]


@dataclass(frozen=True)
class Point:
    """A layout in the plane of time and memory, and which of the `MARKS` it has."""

    mark: str
    estimate: Estimate
    name: str


# What a point is: its colour, the corners of its mark around its middle, and whether it is hollow.
MARKS = {
    "chosen": (palette.BLUE, 4, False),
    "runner-up": (palette.SKY, 12, False),
    "on the front of time, memory and devices": (palette.GREEN, 3, False),
    "expected": (palette.ORANGE, 5, False),
    "does not fit": (palette.RED, 12, True),
}
# More points than these crowd the picture and its key; points further off than these factors would squeeze the others.
POINTS, TIME_OFF, MEMORY_OFF = 14, 1.6, 2.0


def points(report: Report) -> list[Point]:
    """The layouts worth a point, each once: the chosen, runners-up, the front, the expected, and what lacks memory."""
    listed = [("chosen", report.best, ""), *(("runner-up", other, "") for other in report.others)]
    listed += [("on the front of time, memory and devices", other, "") for other in report.front]
    listed += [("expected", item.estimate, item.title) for item in report.expected if item.estimate is not None]
    listed += [("does not fit", other, "") for other in report.lacking]
    found: dict[object, Point] = {}
    for mark, estimate, title in listed:
        name = f"{title}: {words.details(estimate.layout)}" if title else words.layout_words(estimate.layout)
        found.setdefault(estimate.layout, Point(mark if estimate.fits else "does not fit", estimate, name))
    best = report.best
    near = [point for point in found.values() if point.estimate.step_seconds < TIME_OFF * best.step_seconds]
    return [point for point in near if point.estimate.peak_memory < MEMORY_OFF * best.usable][:POINTS]


def choices(report: Report) -> str:
    """The layouts by time and memory, numbered, with a key below."""
    found = points(report)
    seconds = [point.estimate.step_seconds for point in found]
    memory = [point.estimate.peak_memory / GIB for point in found]
    usable = report.best.usable / GIB
    across = Scale(min(seconds) * 0.85, max(seconds) * 1.08, 66, svg.RIGHT - 20)
    up = Scale(min(*memory, usable) * 0.7, max(*memory, usable) * 1.15, 330, 16)
    marks = [*_frame(across, up), *_limit(up, usable)]
    middles = [(x, up(usable) + 4) for x in range(66, int(svg.RIGHT), 6)] + _middles(found, across, up)
    taken: list[tuple[float, float]] = []
    for index, point in enumerate(found):
        x, y = across(seconds[index]), up(memory[index])
        marks.append(_mark(point.mark, x, y, point.name))
        label = _free(x, y, [*taken, *middles])
        taken.append(label)
        marks.append(svg.text(*label, str(index + 1), anchor="middle", size=11.5))
    marks += _names(report, found, 392)
    said = f"{len(found)} layouts by seconds a step and memory of the fullest rank; the key names them."
    return svg.picture("choices", "The choices by time and memory", said, 400 + 19 * len(found), marks)


def _middles(found: Sequence[Point], across: Scale, up: Scale) -> list[tuple[float, float]]:
    """Where the marks are, as baselines that a label would have on them."""
    return [(across(point.estimate.step_seconds), up(point.estimate.peak_memory / GIB) + 4) for point in found]


def _frame(across: Scale, up: Scale) -> Iterator[str]:
    for value in across.ticks():
        x = across(value)
        yield svg.line(x, up.end, x, up.start, opacity=0.15)
        yield svg.text(x, up.start + 17, f"{value:g}", anchor="middle")
    for value in up.ticks():
        y = up(value)
        yield svg.line(across.start, y, across.end, y, opacity=0.15)
        yield svg.text(across.start - 8, y + 4, f"{value:g}", anchor="end")
    log = " (logarithmic)"
    yield svg.text(
        (across.start + across.end) / 2, up.start + 36, f"seconds a step{log * across.logarithmic}", anchor="middle"
    )
    yield svg.text(12, up.end + 2, "GiB")


def _limit(up: Scale, usable: float) -> Iterator[str]:
    y = up(usable)
    yield svg.line(66, y, svg.RIGHT - 20, y, width=1.5, dash="5 3")
    yield svg.text(svg.RIGHT - 22, y - 5, f"usable, {usable:.3g} GiB", anchor="end")


def _mark(kind: str, x: float, y: float, hint: str) -> str:
    fill, corners, hollow = MARKS[kind]
    size = 7.5 if corners == 4 else 6.0
    turned = [2 * pi * corner / corners - pi / 2 for corner in range(corners)]
    around = [(x + size * cos(angle), y + size * sin(angle)) for angle in turned]
    return svg.shape(around, fill=fill, hollow=hollow, hint=hint)


def _free(x: float, y: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The place around a mark for its number that is furthest from all that is there."""
    places = [(x + 13, y + 4), (x - 13, y + 4), (x, y - 10), (x, y + 18), (x + 11, y - 7), (x - 11, y - 7),
              (x + 11, y + 16), (x - 11, y + 16)]  # fmt: skip
    return max(places, key=lambda place: min(20.0, min(hypot(place[0] - at[0], place[1] - at[1]) for at in taken)))


def _names(report: Report, found: Sequence[Point], top: float) -> Iterator[str]:
    """The key: mark, number, layout, and its devices where they differ."""
    several = len({point.estimate.devices for point in found}) > 1
    for index, point in enumerate(found):
        y = top + 19 * index
        devices = f", {point.estimate.devices:,} devices" if several else ""
        yield _mark(point.mark, 22, y - 4, "")
        yield svg.text(48, y, str(index + 1), anchor="end", size=12)
        yield svg.text(58, y, f"{point.name}{devices}: {point.mark}", size=12)
