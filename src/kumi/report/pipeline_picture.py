"""Pictures of pipeline timelines: one lane per pipeline rank, one box per action."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kumi.plan.pipeline.timeline import TimedAction, Timeline
from kumi.report import palette, phrases, svg
from kumi.report.quantities import pick

# The most actions drawn: more would be too thin to see and make the page large.
SPANS = 2400
# Height of a lane.
LANE = 22.0
ACTIONS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}


def draw_timelines(pipeline: Timeline) -> dict[str, str]:
    """Draw the timeline; if boxes are too narrow for their numbers, also draw its beginning enlarged."""
    shortest = min(span.end - span.start for rank in pipeline.spans for span in rank if span.end > span.start)
    label_width = svg.width_of("000", 10) + 2
    drawn = {"timeline": draw_timeline(pipeline, "timeline", _window(pipeline))}
    readable = (svg.RIGHT - 70) / label_width * shortest
    if readable < 0.8 * pipeline.seconds:
        drawn["timeline-start"] = draw_timeline(pipeline, "timeline-start", min(pipeline.seconds, 1.5 * readable))
    return drawn


def draw_timeline(pipeline: Timeline, name: str, until: float) -> str:
    """Draw one lane per pipeline rank, at most 32, with one box per action before `until` seconds.

    A box shows the number of its microbatch; gaps are the bubble.
    """
    ranks = pick(len(pipeline.spans), 32, 0)
    left = 14 + svg.width_of(f"rank {ranks[-1]}")
    scale = (svg.RIGHT - left) / until
    drawn = [(rank, span) for rank in ranks for span in pipeline.spans[rank] if span.start < until]
    kinds = [kind for kind in ACTIONS if any(span.action.kind == kind for _, span in drawn)]
    first = {rank: min(span.action.stage for span in pipeline.spans[rank]) for rank in ranks}
    marks, top = _key(kinds, any(span.action.stage != first[rank] for rank, span in drawn))
    marks += _lanes(pipeline, ranks, left, top, scale, until)
    bottom = top + LANE * len(ranks)
    marks += _clock(left, top, bottom, scale, until)
    shown = "" if until >= pipeline.seconds else f"; the first {phrases.seconds(until)} are shown"
    idle = phrases.percent(sum(pipeline.idle) / pipeline.seconds / len(pipeline.idle))
    description = (
        f"The actions of {len(pipeline.spans)} pipeline ranks in the {phrases.seconds(pipeline.seconds)} of a step's "
        f"microbatches{shown}. Ranks are idle {idle} of the time on average."
    )
    return svg.picture(name, "Pipeline timeline", description, bottom + 28, marks)


def draw_measured_and_planned(measured: Timeline, planned: Timeline | None, name: str) -> str:
    """Draw the measured timeline above the planned one, on the same time scale, with at most 32 ranks each."""
    ranks = pick(len(measured.spans), 32, 0)
    left = 14 + svg.width_of(f"rank {ranks[-1]}")
    blocks = [("measured", measured), *([] if planned is None else [("planned", planned)])]
    until = max(pipeline.seconds for _, pipeline in blocks)
    scale = (svg.RIGHT - left) / until
    kinds = [kind for kind in ACTIONS if any(span.action.kind == kind for rank in measured.spans for span in rank)]
    marks, top = _key(kinds, any(len({span.action.stage for span in rank}) > 1 for rank in measured.spans))
    first, titles = top, []
    for title, pipeline in blocks:
        idle = phrases.percent(sum(pipeline.idle) / pipeline.seconds / len(pipeline.idle))
        titles.append(f"{title}: {phrases.seconds(pipeline.seconds)}, ranks idle {idle} of it")
        marks.append(svg.text(left, top + 15, titles[-1]))
        marks += _lanes(pipeline, ranks, left, top + LANE, scale, until)
        top += LANE * (len(ranks) + 1) + 6
    marks += _clock(left, first, top, scale, until)
    return svg.picture(name, "Pipeline, measured and planned", "; ".join(titles), top + 28, marks)


def _lanes(
    pipeline: Timeline, ranks: Sequence[int], left: float, top: float, scale: float, until: float
) -> Iterator[str]:
    """Draw a lane for each of `ranks`, from `top` down, with the actions that begin before `until`."""
    for lane, rank in enumerate(ranks):
        y, first = top + LANE * lane, min(span.action.stage for span in pipeline.spans[rank])
        yield svg.text(left - 8, y + 15, f"rank {rank}", anchor="end")
        for span in pipeline.spans[rank]:
            if span.start < until:
                x, width = left + scale * span.start, scale * (min(span.end, until) - span.start)
                yield from _box(span, x, y, width, span.action.stage != first)


def _window(pipeline: Timeline) -> float:
    """Return the seconds to draw: all, or those of the first `SPANS` actions."""
    starts = sorted(span.start for rank in pipeline.spans for span in rank)
    return pipeline.seconds if len(starts) <= SPANS else starts[SPANS]


def _key(kinds: Sequence[str], later: bool) -> tuple[list[str], float]:
    """Draw the legend; return its marks and its lower edge. `later`: some ranks have several stages."""
    entries = [(ACTIONS[kind], palette.ACTION_COLOURS[kind], kind == "W") for kind in kinds]
    marks, end = svg.legend([*entries, *([("underlined: a rank's later stages", "", False)] if later else [])])
    return marks, end + 8


def _box(span: TimedAction, x: float, y: float, width: float, later: bool) -> Iterator[str]:
    """Draw an action; `later` underlines it, for stages after the rank's first."""
    kind, stage, microbatch = span.action
    fill = palette.ACTION_COLOURS[kind]
    hint = f"{ACTIONS[kind]}, stage {stage}, microbatch {microbatch}"
    yield svg.rect(x, y + 2, width, LANE - 4, fill, hatched=kind == "W", hint=hint, apart=True)
    if later:
        yield svg.rect(x, y + LANE - 5, width, 3, svg.INK)
    label = str(microbatch)
    if kind != "W" and svg.width_of(label, 10) + 2 < width:
        yield svg.text(x + width / 2, y + 14, label, anchor="middle", size=10, fill=svg.contrasting(fill))


def _clock(left: float, top: float, bottom: float, scale: float, until: float) -> Iterator[str]:
    """Draw the time axis."""
    unit, factor = ("s", 1.0) if until >= 1 else ("ms", 1e3)
    values = svg.ticks(until * factor)
    for value in values:
        x = left + scale * value / factor
        yield svg.line(x, top, x, bottom, opacity=0.15)
        label = f"{value:g}{' ' + unit if value == values[-1] else ''}"
        yield svg.text(min(x, svg.RIGHT), bottom + 17, label, anchor="end" if x > svg.RIGHT - 20 else "middle")
