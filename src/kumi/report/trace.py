"""The timeline as a trace in Chrome's event format, which Perfetto opens: https://ui.perfetto.dev, chrome://tracing.

Format: Google, "Trace Event Format". Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.plan.timeline import Timeline

NAMES = {"F": "forward", "B": "backward", "I": "backward (inputs)", "W": "backward (weights)"}


def trace(timeline: Timeline) -> dict[str, Any]:
    """A trace with one process a pipeline rank and one complete event an action."""
    return {"traceEvents": [*_ranks(timeline), *_events(timeline)], "displayTimeUnit": "ms"}


def _ranks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(timeline.spans):
        stages = ", ".join(str(stage) for stage in sorted({span.action.stage for span in spans}))
        where = {"ph": "M", "pid": rank, "tid": rank}
        yield {**where, "name": "process_name", "args": {"name": f"pp rank {rank}"}}
        yield {**where, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {**where, "name": "thread_name", "args": {"name": f"stages {stages}"}}


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, spans in enumerate(timeline.spans):
        for (kind, stage, microbatch), start, end in spans:
            yield {
                "ph": "X", "pid": rank, "tid": rank, "name": f"{kind}{microbatch}", "cat": NAMES[kind],
                "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": {"stage": stage, "microbatch": microbatch},
            }  # fmt: skip
