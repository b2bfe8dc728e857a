"""Write the measured timeline of a pipeline in one step, next to the planned one."""

from __future__ import annotations

import json

from kumi.config import ResolvedRun
from kumi.files.output import write_text
from kumi.plan.estimate import estimated_timeline
from kumi.plan.pipeline.timeline import Timeline
from kumi.report.pipeline_picture import draw_measured_and_planned
from kumi.report.trace import trace


def write_pipeline_timeline(measured: Timeline | None, run: ResolvedRun, step: int) -> None:
    """Write `pipeline-step-<step>.json` (a trace) and `.svg` into the run folder; nothing if `measured` is None.

    `measured`: the timeline of all stages, which one rank has; None on the others. Both files include the planned
    timeline, unless the device's speed is not known.
    """
    if measured is None:
        return
    planned = estimated_timeline(run.job, run.estimate) if run.step_seconds is not None else None
    file = run.out / f"pipeline-step-{step}.json"
    write_text(file, json.dumps(trace(measured, planned)) + "\n")
    write_text(file.with_suffix(".svg"), draw_measured_and_planned(measured, planned, "pipeline"))
