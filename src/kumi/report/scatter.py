"""The picture of the choices: layouts by the time of a step and the memory they need."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, hypot, log10, pi, sin

from kumi.plan.types import Estimate
from kumi.report import palette, svg, words
from kumi.report.report import Report

GIB = 2.0**30
# From this ratio on an axis is logarithmic.
LOGARITHMIC = 8.0


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
    "on the front": (palette.GREEN, 3, False),
    "expected": (palette.ORANGE, 5, False),
    "does not fit": (palette.RED, 12, True),
}
# More points than these crowd the picture and its key; points further off than these factors would squeeze the others.
POINTS, RUNNERS_UP, TIME_OFF, MEMORY_OFF = 14, 5, 1.6, 2.0
# The distance of two marks from which on neither covers the other.
WIDE = 15.0


def points(report: Report) -> list[Point]:
    """The layouts worth a point, each once: the chosen, runners-up, the front, the expected, and what lacks memory."""
    listed = [("chosen", report.best, ""), *(("runner-up", other, "") for other in report.others[:RUNNERS_UP])]
    listed += [("expected", item.estimate, item.title) for item in report.expected if item.estimate is not None]
    listed += [("does not fit", other, "") for other in report.lacking]
    listed += [("on the front", other, "") for other in report.front]
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
    kinds = [kind for kind in MARKS if any(point.mark == kind for point in found)]
    marks, top = _marks_key(kinds)
    across = Scale(min(seconds) * 0.85, max(seconds) * 1.08, 66, svg.RIGHT - 20)
    up = Scale(min(*memory, usable) * 0.7, max(*memory, usable) * 1.15, top + 320, top + 8)
    true = [(across(time), up(size)) for time, size in zip(seconds, memory, strict=True)]
    places = _apart(true)
    marks += [*_frame(across, up), *_limit(up, usable)]
    marks += [
        svg.line(*place, *moved, opacity=0.5) for place, moved in zip(true, places, strict=True) if place != moved
    ]
    marks += [_mark(point.mark, *place, point.name) for point, place in reversed([*zip(found, places, strict=True)])]
    marks += _numbers(places, [(x, up(usable) + 4) for x in range(66, int(svg.RIGHT), 6)])
    names, bottom = _names(found, top + 382)
    said = f"{len(found)} layouts by seconds a step and memory of the fullest rank; the key names them."
    return svg.picture("choices", "The choices by time and memory", said, bottom, [*marks, *names])


def _marks_key(kinds: Sequence[str]) -> tuple[list[str], float]:
    marks, x = [], 18.0
    for kind in kinds:
        marks += [_mark(kind, x, 16, ""), svg.text(x + 12, 21, kind)]
        x += 36 + svg.width_of(kind)
    return marks, 46.0  # with room for the unit of the axis between the key and its highest number


def _apart(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return where to draw marks that belong at `places`: there, or nearby where an earlier mark would be covered."""
    drawn: list[tuple[float, float]] = []
    for x, y in places:
        rings = (
            (x + radius * cos(angle), y + radius * sin(angle))
            for radius in (WIDE, 2 * WIDE, 3 * WIDE)
            for angle in (pi / 4 * eighth for eighth in range(8))
        )
        free = (
            place
            for place in ((x, y), *rings)
            if all(hypot(place[0] - a, place[1] - b) >= WIDE - 1e-9 for a, b in drawn)
        )
        drawn.append(next(free, (x, y)))
    return drawn


def _numbers(places: Sequence[tuple[float, float]], line: Sequence[tuple[float, float]]) -> Iterator[str]:
    """The number of every mark beside it, away from marks, numbers and the `line`."""
    taken = [*((*place, 2.0) for place in line), *((x, y + 4, 4.0) for x, y in places)]
    for index, place in enumerate(places):
        number = str(index + 1)
        half = svg.width_of(number, 11.5) / 2
        x, y = _free(*place, half, taken)
        taken.append((x, y, half))
        yield svg.text(x, y, number, anchor="middle", size=11.5)


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
    yield svg.text(across.start - 8, up.end - 14, "GiB", anchor="end")


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


def _free(x: float, y: float, half: float, taken: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The place around a mark for a number of width 2 `half` that is furthest from all that is there."""
    side = 9 + half
    places = [
        (x + side, y + 4),
        (x - side, y + 4),
        (x, y - 10),
        (x, y + 18),
        (x + side, y - 7),
        (x - side, y - 7),
        (x + side, y + 16),
        (x - side, y + 16),
    ]

    def room(place: tuple[float, float]) -> float:
        return min(hypot(max(0.0, abs(place[0] - at[0]) - half - at[2]), place[1] - at[1]) for at in taken)

    return max(places, key=lambda place: min(12.0, room(place)))


def _names(found: Sequence[Point], y: float) -> tuple[list[str], float]:
    """The key, and where it ends: mark, number, layout in as many lines as it takes, its devices where they differ."""
    several = len({point.estimate.devices for point in found}) > 1
    marks: list[str] = []
    for index, point in enumerate(found):
        devices = f", {point.estimate.devices:,} devices" if several else ""
        marks += [_mark(point.mark, 22, y - 4, ""), svg.text(48, y, str(index + 1), anchor="end", size=12)]
        for part in textwrap.wrap(point.name + devices, int((svg.RIGHT - 58) / svg.width_of("x", 12))):
            marks.append(svg.text(58, y, part, size=12))
            y += 16
        y += 4
    return marks, y
