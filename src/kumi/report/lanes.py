"""The picture of a pipeline in time: what every rank does when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kumi.plan.timeline import Span, Timeline
from kumi.report import palette, svg, words
from kumi.report.figures import pick

# Actions that are drawn at most: more than these are too thin to see, and make a page heavy.
SPANS = 2400
LANE = 22.0
ACTIONS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}


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
    marks += _lanes(found, ranks, left, top, scale, until)
    bottom = top + LANE * len(ranks)
    marks += _clock(left, top, bottom, scale, until)
    part = "" if until >= found.seconds else f", of which the first {words.seconds(until)} are shown"
    waiting = words.percent(sum(found.idle) / found.seconds / len(found.idle))
    said = (
        f"What {len(found.spans)} pipeline ranks do in the {words.seconds(found.seconds)} of a step's "
        f"microbatches{part}. They wait {waiting} of the time on average."
    )
    return svg.picture(name, "Pipeline timeline", said, bottom + 28, marks)


def compared(measured: Timeline, planned: Timeline | None, name: str) -> str:
    """What the ranks did, as measured, above what was planned for them, on one scale of time."""
    ranks = pick(len(measured.spans), 32, 0)
    left = 14 + svg.width_of(f"rank {ranks[-1]}")
    blocks = [("measured", measured), *([] if planned is None else [("planned", planned)])]
    until = max(found.seconds for _, found in blocks)
    scale = (svg.RIGHT - left) / until
    kinds = [kind for kind in ACTIONS if any(span.action.kind == kind for rank in measured.spans for span in rank)]
    marks, top = _key(kinds, any(len({span.action.stage for span in rank}) > 1 for rank in measured.spans))
    first, said = top, []
    for title, found in blocks:
        idle = words.percent(sum(found.idle) / found.seconds / len(found.idle))
        said.append(f"{title}: {words.seconds(found.seconds)}, ranks wait {idle} of it")
        marks.append(svg.text(left, top + 15, said[-1]))
        marks += _lanes(found, ranks, left, top + LANE, scale, until)
        top += LANE * (len(ranks) + 1) + 6
    marks += _clock(left, first, top, scale, until)
    return svg.picture(name, "Pipeline, measured and planned", "; ".join(said), top + 28, marks)


def _lanes(found: Timeline, ranks: Sequence[int], left: float, top: float, scale: float, until: float) -> Iterator[str]:
    """A lane for each of `ranks`, one below the other from `top` on, with all that begins before `until`."""
    for lane, rank in enumerate(ranks):
        y, first = top + LANE * lane, min(span.action.stage for span in found.spans[rank])
        yield svg.text(left - 8, y + 15, f"rank {rank}", anchor="end")
        for span in found.spans[rank]:
            if span.start < until:
                x, width = left + scale * span.start, scale * (min(span.end, until) - span.start)
                yield from _box(span, x, y, width, span.action.stage != first)


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
