"""A pipeline timeline as a Chrome trace, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Format: Google, "Trace Event Format". Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.plan.pipeline.timeline import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


def trace(timeline: Timeline, planned: Timeline | None = None) -> dict[str, Any]:
    """Return a trace with one process per pipeline rank and one complete event per action.

    The ranks of `planned`, if given, follow below those of `timeline`, which is then the measured one.
    """
    events = [*_ranks(timeline, "pp rank", 0), *_events(timeline, 0)]
    if planned is not None:
        below = len(timeline.spans)
        events += [*_ranks(planned, "planned pp rank", below), *_events(planned, below)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _ranks(timeline: Timeline, title: str, first: int) -> Iterator[dict[str, Any]]:
    """Yield the metadata events that name the processes `title` 0, 1, ...; process ids begin at `first`."""
    for number, spans in enumerate(timeline.spans):
        rank = first + number
        stages = ", ".join(str(stage) for stage in sorted({span.action.stage for span in spans}))
        metadata = {"ph": "M", "pid": rank, "tid": rank}
        yield {**metadata, "name": "process_name", "args": {"name": f"{title} {number}"}}
        yield {**metadata, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {**metadata, "name": "thread_name", "args": {"name": f"stages {stages}"}}


def _events(timeline: Timeline, first: int) -> Iterator[dict[str, Any]]:
    """Yield one event per action; times in microseconds."""
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
