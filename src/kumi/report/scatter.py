"""A scatter plot of layouts by step time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, hypot, log10, pi, sin

from kumi.plan.estimates import Estimate
from kumi.plan.report import Report
from kumi.report import palette, phrases, svg
from kumi.report.letter_widths import wrap_text

_GIB = 2.0**30
# An axis whose values span a larger ratio than this is logarithmic.
LOGARITHMIC = 8.0


@dataclass(frozen=True)
class Scale:
    """A map of values from `low` to `high` to coordinates from `start` to `end`; logarithmic for a wide range."""

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
        """Return round values between `low` and `high`."""
        if not self.logarithmic:
            return [value for value in svg.ticks(self.high, 10) if value >= self.low]
        powers = range(int(log10(self.low)) - 1, int(log10(self.high)) + 2)
        values = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        return [value for value in values if self.low <= value <= self.high]


@dataclass(frozen=True)
class Point:
    """A layout in the plot; `mark` is a key of `MARKS`, `name` its text in the legend."""

    mark: str
    estimate: Estimate
    name: str


# Kind of point -> (colour, corners of its marker, hollow). Standard layouts are "expected".
MARKS = {
    "chosen": (palette.BLUE, 4, False),
    "runner-up": (palette.SKY, 12, False),
    "on the front": (palette.GREEN, 3, False),
    "expected": (palette.ORANGE, 5, False),
    "does not fit": (palette.RED, 12, True),
}
# The most points and runners-up in the plot.
POINTS, RUNNERS_UP = 14, 5
# Points beyond these multiples of the chosen step time and the usable memory are left out.
TIME_LIMIT, MEMORY_LIMIT = 1.6, 2.0
# The distance at which a number and another text do not overlap.
_CLEAR = 10.8
# The distance at which two markers do not overlap.
MARKER_DISTANCE = 15.0


def points(report: Report) -> list[Point]:
    """Return the layouts to plot, each once: chosen, runners-up, standard ones, those that do not fit, Pareto front."""
    listed = [("chosen", report.best, ""), *(("runner-up", other, "") for other in report.others[:RUNNERS_UP])]
    listed += [("expected", item.estimate, item.title) for item in report.expected if item.estimate is not None]
    listed += [("does not fit", other, "") for other in report.lacking]
    listed += [("on the front", other, "") for other in report.front]
    unique: dict[object, Point] = {}
    for mark, estimate, title in listed:
        name = f"{title}: {phrases.details(estimate.layout)}" if title else phrases.layout_words(estimate.layout)
        unique.setdefault(estimate.layout, Point(mark if estimate.fits else "does not fit", estimate, name))
    best = report.best
    near = [point for point in unique.values() if point.estimate.step_seconds < TIME_LIMIT * best.step_seconds]
    return [point for point in near if point.estimate.peak_memory < MEMORY_LIMIT * best.usable][:POINTS]


def draw_choices(report: Report) -> str:
    """Draw the layouts by step time and memory, numbered, with a legend below."""
    plotted = points(report)
    seconds = [point.estimate.step_seconds for point in plotted]
    memory = [point.estimate.peak_memory / _GIB for point in plotted]
    usable = report.best.usable / _GIB
    kinds = [kind for kind in MARKS if any(point.mark == kind for point in plotted)]
    marks, top = _marks_key(kinds)
    across = Scale(min(seconds) * 0.85, max(seconds) * 1.08, 66, svg.RIGHT - 20)
    up = Scale(min(*memory, usable) * 0.7, max(*memory, usable) * 1.15, top + 320, top + 8)
    exact = [(across(time), up(size)) for time, size in zip(seconds, memory, strict=True)]
    places = _apart(exact)
    marks += [*_frame(across, up), *_limit(up, usable)]
    marks += [
        svg.line(*place, *moved, opacity=0.5) for place, moved in zip(exact, places, strict=True) if place != moved
    ]
    marks += [_mark(point.mark, *place, point.name) for point, place in reversed([*zip(plotted, places, strict=True)])]
    half = svg.width_of(_limit_label(usable)) / 2
    label = (svg.RIGHT - 22 - half, up(usable) - 5, half)
    marks += _numbers(places, [label, *((x, up(usable) + 4, 2.0) for x in range(66, int(svg.RIGHT), 6))])
    names, bottom = _names(plotted, top + 382)
    description = f"{len(plotted)} layouts by seconds per step and memory of the fullest rank; the legend names them."
    return svg.picture("choices", "Layouts by step time and memory", description, bottom, [*marks, *names])


def _marks_key(kinds: Sequence[str]) -> tuple[list[str], float]:
    """Draw the legend of the markers; return its marks and its height."""
    marks, x = [], 18.0
    for kind in kinds:
        marks += [_mark(kind, x, 16, ""), svg.text(x + 12, 21, kind)]
        x += 36 + svg.width_of(kind)
    return marks, 46.0  # leaves room for the unit of the vertical axis


def _apart(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return `places`, each moved nearby if it would cover an earlier marker."""
    drawn: list[tuple[float, float]] = []
    for x, y in places:
        rings = (
            (x + radius * cos(angle), y + radius * sin(angle))
            for radius in (MARKER_DISTANCE, 2 * MARKER_DISTANCE, 3 * MARKER_DISTANCE)
            for angle in (pi / 4 * eighth for eighth in range(8))
        )
        free = (
            place
            for place in ((x, y), *rings)
            if all(hypot(place[0] - a, place[1] - b) >= MARKER_DISTANCE - 1e-9 for a, b in drawn)
        )
        drawn.append(next(free, (x, y)))
    return drawn


def _numbers(places: Sequence[tuple[float, float]], drawn: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """Draw the number of every marker beside it, away from markers, other numbers and what is `drawn`.

    `drawn`: (middle, baseline, half of the width) of texts and of parts of lines.
    """
    taken = [*drawn, *((x, y + 4, 4.0) for x, y in places)]
    for index, place in enumerate(places):
        number = str(index + 1)
        half = svg.width_of(number, 11.5) / 2
        x, y = _free(*place, half, taken)
        taken.append((x, y, half))
        yield svg.text(x, y, number, anchor="middle", size=11.5)


def _frame(across: Scale, up: Scale) -> Iterator[str]:
    """Draw the axes with grid lines and labels."""
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
        (across.start + across.end) / 2, up.start + 36, f"seconds per step{log * across.logarithmic}", anchor="middle"
    )
    yield svg.text(across.start - 8, up.end - 14, "GiB", anchor="end")


def _limit(up: Scale, usable: float) -> Iterator[str]:
    """Draw the line of the usable memory, in GiB."""
    y = up(usable)
    yield svg.line(66, y, svg.RIGHT - 20, y, width=1.5, dash="5 3")
    yield svg.text(svg.RIGHT - 22, y - 5, _limit_label(usable), anchor="end")


def _limit_label(usable: float) -> str:
    return f"usable, {usable:.3g} GiB"


def _mark(kind: str, x: float, y: float, hint: str) -> str:
    """Draw the marker of a `kind` of point around (x, y), with the tooltip `hint`."""
    fill, corners, hollow = MARKS[kind]
    size = 7.5 if corners == 4 else 6.0
    angles = [2 * pi * corner / corners - pi / 2 for corner in range(corners)]
    outline = [(x + size * cos(angle), y + size * sin(angle)) for angle in angles]
    return svg.shape(outline, fill=fill, hollow=hollow, hint=hint)


def _free(x: float, y: float, half: float, taken: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the place beside a marker, for a number of width 2 `half`, that is furthest from all in `taken`."""

    def room(place: tuple[float, float]) -> float:
        """Return the distance of a number at `place` from the nearest of `taken`."""
        return min(hypot(max(0.0, abs(place[0] - at[0]) - half - at[2]), place[1] - at[1]) for at in taken)

    def best(offset: float) -> tuple[float, float]:
        """Return the place with the most room around the marker, `offset` further from it than the closest."""
        side = 9 + half + offset
        rows = [(x + way * side, y + 4 + down) for down in (0, -11 - offset, 12 + offset) for way in (1, -1)]
        return max([*rows, (x, y - 10 - offset), (x, y + 18 + offset)], key=lambda place: min(12.0, room(place)))

    # The nearest place where the number covers no text; where there is none, the place with the most room.
    places = [best(offset) for offset in (0.0, 8.0, 16.0, 24.0)]
    return next((place for place in places if room(place) >= _CLEAR), max(places, key=room))


def _names(plotted: Sequence[Point], y: float) -> tuple[list[str], float]:
    """Draw the legend of the layouts; return its marks and its lower edge.

    Each entry has marker, number and layout, and the number of devices if it differs between layouts.
    """
    differ = len({point.estimate.devices for point in plotted}) > 1
    marks: list[str] = []
    for index, point in enumerate(plotted):
        devices = f", {point.estimate.devices:,} devices" if differ else ""
        marks += [_mark(point.mark, 22, y - 4, ""), svg.text(48, y, str(index + 1), anchor="end", size=12)]
        for part in wrap_text(point.name + devices, svg.RIGHT - 58, 12):
            marks.append(svg.text(58, y, part, size=12))
            y += 16
        y += 4
    return marks, y
