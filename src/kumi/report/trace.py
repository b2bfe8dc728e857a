"""The timeline as a trace in Chrome's event format, which Perfetto opens: https://ui.perfetto.dev, chrome://tracing.

Format: Google, "Trace Event Format". Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.plan.timeline import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


def trace(timeline: Timeline, planned: Timeline | None = None) -> dict[str, Any]:
    """A trace with one process a pipeline rank and one complete event an action; below it what was `planned`, where
    `timeline` is what was measured."""
    events = [*_ranks(timeline, "pp rank", 0), *_events(timeline, 0)]
    if planned is not None:
        below = len(timeline.spans)
        events += [*_ranks(planned, "planned pp rank", below), *_events(planned, below)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _ranks(timeline: Timeline, called: str, first: int) -> Iterator[dict[str, Any]]:
    for number, spans in enumerate(timeline.spans):
        rank = first + number
        stages = ", ".join(str(stage) for stage in sorted({span.action.stage for span in spans}))
        where = {"ph": "M", "pid": rank, "tid": rank}
        yield {**where, "name": "process_name", "args": {"name": f"{called} {number}"}}
        yield {**where, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {**where, "name": "thread_name", "args": {"name": f"stages {stages}"}}


def _events(timeline: Timeline, first: int) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(timeline.spans, first):
        for (kind, stage, microbatch), start, end in spans:
            yield {
                "ph": "X",
                "pid": rank,
                "tid": rank,
                "name": f"{kind}{microbatch}",
                "cat": NAMES[kind],
                "ts": 1e6 * start,
                "dur": 1e6 * (end - start),
                "args": {"stage": stage, "microbatch": microbatch},
            }
