"""The plan of a run, stored in its folder as plan.json: the layout, the job that it was chosen for, and its estimate.

layout     every field of the layout
pinned     the fields that the run file pinned; the planner chose the others
made_for   digest of the model, batch, precision and machines
estimate   seconds of a step and bytes of the fullest rank
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kumi import __version__
from kumi.config.job_sections import LayoutSection, PrecisionKind
from kumi.config.pinned_run import layout_keys
from kumi.config.section import Positive, Section
from kumi.config.validation_messages import describe_errors
from kumi.errors import RefusedError
from kumi.files.untrusted import CONFIG, read_bytes, strict_json
from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.saved_tensors import model_digest

PLAN_FILE = "plan.json"


class MadeFor(Section):
    """Everything that decides whether a layout fits: model (a digest), batch, precision and machines."""

    model: str
    seq_len: Positive
    tokens_per_step: Positive
    precision: PrecisionKind
    device: str
    device_kind: str
    device_memory: int
    devices_per_node: Positive
    nodes: Positive


@dataclass(frozen=True)
class RunPlan:
    """The layout of a run, the fields that the run file pinned, the job that it was made for, and its estimate."""

    layout: Layout
    pinned: Pins
    made_for: MadeFor
    estimate: Mapping[str, Any]

    def text(self) -> str:
        """Return the content of plan.json."""
        return json.dumps({"kumi": __version__, **self.plain()}, indent=1) + "\n"

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain data; `parse_plan` is the inverse."""
        return {
            "layout": layout_keys(self.layout),
            "pinned": dict(self.pinned),
            "made_for": self.made_for.model_dump(),
            "estimate": dict(self.estimate),
        }


def made_for(job: Job) -> MadeFor:
    """Return the properties of `job` that decide whether a layout fits."""
    cluster = job.cluster
    return MadeFor(
        model=model_digest(job.model),
        seq_len=job.batch.seq_len,
        tokens_per_step=job.batch.tokens_per_step,
        precision=job.precision.kind,
        device=cluster.device.name,
        device_kind=cluster.device.kind,
        device_memory=cluster.device.memory,
        devices_per_node=cluster.devices_per_node,
        nodes=cluster.nodes,
    )


def estimate_figures(estimate: Estimate, *, speed_known: bool) -> dict[str, Any]:
    """Return the times and bytes of `estimate` for plan.json; no times if the device's speed is unknown."""
    fullest = max(estimate.memory, key=lambda stage: stage.total)
    seconds = {"step_seconds": estimate.step_seconds, "time": dict(estimate.time)} if speed_known else {}
    return {**seconds, "memory_bytes": fullest.total, "memory": asdict(fullest)}


def read_plan(out: Path) -> RunPlan | None:
    """Return the plan of the run in the folder `out`; None if a version without plans wrote the folder.

    Raise RefusedError if the file is damaged.
    """
    if not (out / PLAN_FILE).is_file():
        return None
    try:
        written = strict_json(read_bytes(out, PLAN_FILE, RefusedError), CONFIG)
    except ValueError as error:
        raise _damaged(str(out / PLAN_FILE), f"not valid JSON: {error}") from None
    return parse_plan(written, str(out / PLAN_FILE))


def parse_plan(written: Mapping[str, Any], where: str) -> RunPlan:
    """Return the plan in the JSON object `written`. Raise RefusedError, which names `where`, if it is not valid."""
    try:
        layout, pinned = (LayoutSection.model_validate(written[key]) for key in ("layout", "pinned"))
        fields = layout.model_dump(exclude_none=True)
        properties, estimate = MadeFor.model_validate(written["made_for"]), dict(written["estimate"])
        plan = RunPlan(Layout(**fields), pinned.model_dump(exclude_none=True), properties, estimate)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(where, _reason(error)) from None
    return plan


def _damaged(where: str, reason: str) -> RefusedError:
    """Return the error that the plan in `where` is damaged."""
    return RefusedError(
        f"{where} is damaged ({reason}), so the layout of the run is not known; restore the file, or delete it to let "
        f"kumi choose a layout"
    )


def _reason(error: Exception) -> str:
    """Return the reason of an error that `parse_plan` met, for a message."""
    if isinstance(error, ValidationError):
        return describe_errors(error, LayoutSection if error.title == LayoutSection.__name__ else MadeFor)
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
