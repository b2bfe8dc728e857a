"""The pictures of a report as SVG: bar charts; timelines are in `pipeline_picture`, the scatter plot in `scatter`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kumi.plan.report import Report, StandardLayout
from kumi.report import palette, phrases, svg
from kumi.report.pipeline_picture import draw_timelines
from kumi.report.quantities import Traffic, fullest, memory_kinds, noticeable, pick, stage_groups, time_kinds, traffic
from kumi.report.scatter import draw_choices
from kumi.units import format_bytes

_GIB = 2.0**30
# Height of a row, and of the bar in it.
ROW, BAR = 28.0, 18.0
# The most pipeline ranks drawn; the table has all of them.
_MAX_RANKS = 16


def pictures(report: Report) -> dict[str, str]:
    """Return SVG documents by name: memory, time; timeline, traffic, expected and choices if the report has them."""
    drawn = {"memory": draw_memory(report), "time": draw_time(report)}
    if report.timeline is not None:
        drawn |= draw_timelines(report.timeline)
    if report.best.collectives:
        drawn["traffic"] = draw_links(report)
    if report.expected:
        drawn["expected"] = draw_standard_layouts(report)
    if report.others or report.front or report.lacking:
        drawn["choices"] = draw_choices(report)
    return drawn


def draw_memory(report: Report) -> str:
    """Draw the memory of the pipeline ranks by kind, relative to the device's memory."""
    best, capacity = report.best, report.job.cluster.device.memory
    groups = stage_groups(best)
    fullest_group = next(index for index, group in enumerate(groups) if group.first <= fullest(best) <= group.last)
    shown = [groups[index] for index in pick(len(groups), _MAX_RANKS, fullest_group)]
    kinds = [kind for kind in phrases.MEMORY if any(getattr(group.memory, kind) for group in shown)]
    left = 14 + max(svg.width_of(group.name) for group in shown)
    marks, top = svg.legend(
        [(phrases.MEMORY[kind], palette.MEMORY_COLOURS[kind], kind in palette.HATCHED) for kind in kinds]
    )
    most = max(capacity, best.peak_memory) / _GIB * 1.02
    scale = (svg.RIGHT - left - 14 - svg.width_of(f"device {format_bytes(capacity)}")) / most
    top += 40
    bottom = top + ROW * len(shown)
    marks += draw_axis(left, top, bottom, scale, most, "GiB")
    for row, group in enumerate(shown):
        y = top + ROW * row + (ROW - BAR) / 2
        marks.append(svg.text(left - 8, y + BAR - 4, group.name, anchor="end"))
        marks += _stack(left, y, scale, memory_kinds(group.memory))
        marks.append(svg.text(svg.RIGHT, y + BAR - 4, format_bytes(group.memory.total), anchor="end", bold=True))
    marks += _limits(left, top, bottom, scale, best.usable, capacity)
    description = (
        f"Stacked bars, one per pipeline rank or group of equal ranks. The fullest is rank {fullest(best)} with "
        f"{format_bytes(best.peak_memory)} of {format_bytes(best.usable)} usable."
    )
    return svg.picture("memory", "Memory by kind", description, bottom + 40, marks)


def _limits(left: float, top: float, bottom: float, scale: float, usable: int, capacity: int) -> Iterator[str]:
    """Draw the lines of the usable memory and of the device's, with labels that do not lie over each other."""
    texts = [f"{name} {format_bytes(size)}" for name, size in (("usable", usable), ("device", capacity))]
    inner, outer = (left + scale * size / _GIB for size in (usable, capacity))
    widths = [svg.width_of(text) for text in texts]
    # The labels are on the outer sides of their lines where they have room there.
    anchors = ["end" if inner - widths[0] > 0 else "start", "start" if outer + widths[1] <= svg.RIGHT else "end"]
    spans = [
        (x - width, x) if anchor == "end" else (x, x + width)
        for x, width, anchor in zip((inner, outer), widths, anchors, strict=True)
    ]
    raised = 18.0 if spans[0][1] + 6 > spans[1][0] and spans[1][1] + 6 > spans[0][0] else 0.0
    yield svg.line(inner, top - 4 - raised, inner, bottom, width=1.5, dash="5 3")
    yield svg.text(inner, top - 8 - raised, texts[0], anchor=anchors[0])
    yield svg.line(outer, top - 4, outer, bottom, width=1.5)
    yield svg.text(outer, top - 8, texts[1], anchor=anchors[1])


def _stack(left: float, y: float, scale: float, kinds: Sequence[tuple[str, int]]) -> list[str]:
    """Draw a stacked bar of (kind, bytes) from `left`, `scale` units per GiB."""
    marks, x = [], left
    for kind, size in kinds:
        width, fill = scale * size / _GIB, palette.MEMORY_COLOURS[kind]
        hint = f"{phrases.MEMORY[kind]}: {format_bytes(size)}"
        hatched = kind in palette.HATCHED
        marks.append(svg.rect(x, y, width, BAR, fill, hatched=hatched, hint=hint, apart=True))
        label = f"{size / _GIB:.3g}"
        if not hatched and svg.width_of(label, 11) + 4 < width:
            marks.append(
                svg.text(x + width / 2, y + BAR - 5, label, anchor="middle", size=11, fill=svg.contrasting(fill))
            )
        x += width
    return marks


def draw_axis(left: float, top: float, bottom: float, scale: float, most: float, unit: str) -> list[str]:
    """Draw vertical grid lines from `top` to `bottom` with their values below, and the unit after the last one."""
    marks = []
    values = svg.ticks(most)
    for value in values:
        x = left + scale * value
        last = f" {unit}" if value == values[-1] else ""
        marks.append(svg.line(x, top, x, bottom, opacity=0.15))
        marks.append(svg.text(x, bottom + 17, f"{value:g}{last}", anchor="middle"))
    return marks


def draw_time(report: Report) -> str:
    """Draw the time of a step by kind, longest first."""
    best = report.best
    rows = time_kinds(best)
    left = 14 + max(svg.width_of(phrases.time_name(kind)) for kind, _ in rows)
    most = rows[0][1]
    scale = (svg.RIGHT - left - 130) / most
    marks = []
    for index, (kind, value) in enumerate(rows):
        y = 12 + ROW * index
        fill, share = palette.time_colour(kind), phrases.percent(value / best.step_seconds)
        marks.append(svg.text(left - 8, y + BAR - 4, phrases.time_name(kind), anchor="end"))
        marks.append(svg.rect(left, y, scale * value, BAR, fill, hatched=kind in phrases.TRAFFIC))
        marks.append(svg.text(left + scale * value + 6, y + BAR - 4, f"{phrases.seconds(value)}, {share}"))
    description = f"Seconds by kind, {phrases.seconds(best.step_seconds)} in total; {rows[0][0]} takes the longest."
    return svg.picture("time", "Time of a step by kind", description, 12 + ROW * len(rows) + 8, marks)


def draw_links(report: Report) -> str:
    """Draw the exposed and hidden time of each axis on its link, and the share of the bandwidth that it achieves."""
    step = report.best.step_seconds
    rows = noticeable(traffic(report.job, report.best), step)
    busy, achieved = (14.0, 3.8), (456.0, 2.4)
    marks, top = svg.legend([("exposed", palette.RED, False), ("hidden behind compute", palette.SKY, True)])
    marks.append(svg.text(busy[0], top + 18, "time, share of the step"))
    marks.append(svg.text(achieved[0], top + 18, "achieved share of bandwidth"))
    top, height = top + 28, 58.0
    bottom = top + height * len(rows)
    for start, scale in (busy, achieved):
        for value in (0, 25, 50, 75, 100):
            x = start + scale * value
            marks.append(svg.line(x, top, x, bottom, opacity=0.15))
            marks.append(svg.text(x, bottom + 15, f"{value}%", anchor="start" if value == 0 else "middle", size=12))
    for index, row in enumerate(rows):
        marks += _link_row(row, top + height * index, step, busy, achieved)
    title = "Communication of a rank by axis and link"
    return svg.picture("traffic", title, _links_description(rows, step), bottom + 24, marks)


def _link_row(
    row: Traffic, y: float, step: float, busy: tuple[float, float], achieved: tuple[float, float]
) -> Iterator[str]:
    """Draw the name, two bars, and a line of figures under each; `busy` and `achieved` are (left edge, scale)."""
    (left, scale), (right, right_scale) = busy, achieved
    exposed = min(100.0, 100 * row.exposed / step)
    hidden = min(100.0, 100 * row.busy / step) - exposed
    yield svg.text(left, y + 15, row.name, bold=True)
    yield svg.rect(left, y + 21, scale * exposed, 13, palette.RED)
    yield svg.rect(left + scale * exposed, y + 21, scale * hidden, 13, palette.SKY, hatched=True)
    label = f"{phrases.seconds(row.exposed)} exposed" if row.exposed else "none exposed"
    yield svg.text(left, y + 48, f"{phrases.volume(row.sent)} in {phrases.seconds(row.busy)}, {label}", size=12)
    if row.bandwidth and row.busy:
        rate = row.sent / row.busy
        yield svg.rect(right, y + 21, right_scale * min(100.0, 100 * rate / row.bandwidth), 13, palette.GREEN)
        yield svg.text(right, y + 48, f"{phrases.rate(rate)} of {phrases.rate(row.bandwidth)}", size=12)
    else:
        yield svg.text(right, y + 48, "bandwidth unknown", size=12)


def _links_description(rows: Sequence[Traffic], step: float) -> str:
    """Return the figures of `draw_links` in words, for screen readers."""
    return "; ".join(
        f"{row.name}: {phrases.volume(row.sent)} in {phrases.seconds(row.busy)} of {phrases.seconds(step)}, "
        f"{phrases.seconds(row.exposed)} exposed"
        for row in rows
    )


def draw_standard_layouts(report: Report) -> str:
    """Draw the step times of the chosen layout and of the standard ones, with those that cannot run."""
    best = report.best
    rows = [StandardLayout("Chosen", best.layout, estimate=best), *report.expected]
    left = 14 + max(svg.width_of(row.title) for row in rows)
    most = max(row.estimate.step_seconds for row in rows if row.estimate is not None)
    scale = (svg.RIGHT - left - 190) / most
    marks, top = svg.legend(
        [("chosen", palette.BLUE, False), ("fits", palette.SKY, False), ("does not fit", palette.GREY, True)]
    )
    for index, row in enumerate(rows):
        y = top + 6 + ROW * index
        marks.append(svg.text(left - 8, y + BAR - 4, row.title, anchor="end", bold=index == 0))
        if row.estimate is None:
            marks.append(svg.text(left, y + BAR - 4, "refused"))
            continue
        seconds, need = row.estimate.step_seconds, format_bytes(row.estimate.peak_memory)
        fill = palette.BLUE if index == 0 else palette.SKY if row.fits else palette.GREY
        marks.append(svg.rect(left, y, scale * seconds, BAR, fill, hatched=not row.fits))
        label = f"{phrases.seconds(seconds)}, {need}{'' if row.fits else ': does not fit'}"
        marks.append(svg.text(left + scale * seconds + 6, y + BAR - 4, label))
    description = "; ".join(f"{row.title}: {_outcome(row)}" for row in rows)
    return svg.picture("expected", "Standard layouts for comparison", description, top + 12 + ROW * len(rows), marks)


def _outcome(item: StandardLayout) -> str:
    """Return the step time of a layout that fits, else why it does not run."""
    if item.estimate is None:
        return "refused"
    return phrases.seconds(item.estimate.step_seconds) if item.fits else "does not fit"
