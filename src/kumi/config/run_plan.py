"""The plan of a run, as its folder keeps it in plan.json: the layout, what it was chosen for, and its estimate.

layout     every field of the layout that the run trains with
pinned     the fields that the run file pinned; the others were chosen
made_for   the model's digest, the batch, the precision, and the machines
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
from kumi.config.pinned_run import spelled
from kumi.config.schema import LayoutSection, Positive, PrecisionKind, Section
from kumi.errors import RefusedError
from kumi.files.untrusted import CONFIG, read_bytes, strict_json
from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.saved_tensors import model_digest

PLAN = "plan.json"


class MadeFor(Section):
    """What decides whether a layout fits: the digest of the model, the batch, the precision and the machines."""

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
    """The layout of a run, the fields of it that the run file pinned, what it was made for, and its estimate."""

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
            "layout": spelled(self.layout),
            "pinned": dict(self.pinned),
            "made_for": self.made_for.model_dump(),
            "estimate": dict(self.estimate),
        }


def made_for(job: Job) -> MadeFor:
    """Return what decides whether a layout of `job` fits."""
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
    """Return the figures of `estimate` that plan.json keeps; no seconds where the device's speed is not known."""
    fullest = max(estimate.memory, key=lambda stage: stage.total)
    seconds = {"step_seconds": estimate.step_seconds, "time": dict(estimate.time)} if speed_known else {}
    return {**seconds, "memory_bytes": fullest.total, "memory": asdict(fullest)}


def read_plan(out: Path) -> RunPlan | None:
    """Return the plan of the run in the folder `out`; None in a folder that a version without plans wrote.

    Raise RefusedError where the file is damaged.
    """
    if not (out / PLAN).is_file():
        return None
    try:
        written = strict_json(read_bytes(out, PLAN, RefusedError), CONFIG)
    except ValueError as error:
        raise _damaged(str(out / PLAN), f"not valid JSON: {error}") from None
    return parse_plan(written, str(out / PLAN))


def parse_plan(written: Mapping[str, Any], where: str) -> RunPlan:
    """Return the plan that the JSON object `written` holds. Raise RefusedError, naming `where`, where it holds none."""
    try:
        layout, pinned = (LayoutSection.model_validate(written[key]) for key in ("layout", "pinned"))
        fields = layout.model_dump(exclude_none=True)
        purpose, estimate = MadeFor.model_validate(written["made_for"]), dict(written["estimate"])
        plan = RunPlan(Layout(**fields), pinned.model_dump(exclude_none=True), purpose, estimate)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(where, _reason(error)) from None
    return plan


def _damaged(where: str, reason: str) -> RefusedError:
    return RefusedError(
        f"{where}: damaged ({reason}), so that the layout of the run is not known; restore it, or delete it to have "
        f"the layout chosen anew"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
