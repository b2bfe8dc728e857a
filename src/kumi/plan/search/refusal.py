"""Why there is no plan, in one sentence, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kumi.plan.estimate import estimate
from kumi.plan.memory import device_memory
from kumi.plan.search.candidates import Pins
from kumi.plan.search.remedies import remedies
from kumi.plan.search.search_layouts import Found
from kumi.spec.checks import problems
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.schedules import DEFAULT, SCHEDULES
from kumi.units import format_bytes


def why_illegal(job: Job, pinned: Pins) -> str:
    """What is wrong with the only layouts that `pinned` allows."""
    wrong = problems(job.model, from_pins(job, pinned), job.cluster, job.batch)
    if not wrong and pinned.get("pp") == 1 and pinned.get("schedule", DEFAULT) != DEFAULT:
        wrong = [
            f"layout.schedule={pinned['schedule']} orders a pipeline, and layout.pp=1 has none; "
            f"leave one of them out, or pin layout.pp = 2 or more"
        ]
    return (
        leading(wrong, pinned)
        if wrong
        else (f"no legal layout of {job.cluster.devices} devices agrees with {written(pinned)}; pin less")
    )


def leading(reasons: Sequence[str], pinned: Pins) -> str:
    """Return the first reason about each pinned field, or the first of all, and how many others there are: one wrong
    degree often breaks many rules."""
    about = [next((one for one in reasons if one.startswith(f"{name}=")), None) for name in pinned]
    shown = list(dict.fromkeys(one for one in about if one is not None)) or list(reasons[:1])
    more = len(reasons) - len(shown)
    return "; ".join(shown) + (f" (and {more} more reason{'s' * (more > 1)}, which may go with it)" if more else "")


def from_pins(job: Job, pinned: Pins) -> Layout:
    """The layout that `pinned` names, with data parallelism over the devices that are left, and with what the pins
    leave no choice about: states that are divided over `dp_shard`, as many stages as a schedule needs."""
    fields: dict[str, Any] = {name: tuple(value) if name == "stage_layers" else value for name, value in pinned.items()}
    if "stages" not in pinned and fields.get("schedule") in SCHEDULES:
        fields["stages"] = SCHEDULES[fields["schedule"]].stages
    layout = Layout(**fields)
    rest = max(1, job.cluster.devices // layout.world_size)
    copies = "dp_shard" in pinned or ("dp_replicate" not in pinned and pinned.get("zero") == 0)
    if copies and "dp_replicate" not in pinned:
        layout = replace(layout, dp_replicate=rest)
    elif not copies:
        layout = replace(layout, dp_shard=rest)
    divided = layout.dp_shard > 1 and "zero" not in pinned
    return replace(layout, zero=1) if divided else layout


def written(pinned: Pins) -> str:
    return ", ".join(f"layout.{name}={value}" for name, value in pinned.items()) or "nothing pinned"


def does_not_fit(job: Job, pinned: Pins, found: Found, fixed: Pins = MappingProxyType({})) -> str:
    """Why nothing fits, and the smallest changes that would make something fit, in one sentence. `fixed` is what the
    search could not choose besides what is `pinned`."""
    if found.smallest is None:
        host = job.cluster.host
        return (
            f"layout.offload={pinned['offload']} moves more than the hosts hold, {format_bytes(host.memory)} of memory "
            f"a node and {format_bytes(host.nvme)} on drives; offload less, or use more nodes"
        )
    least = estimate(job, found.smallest)
    need, have = format_bytes(least.peak_memory), format_bytes(device_memory.usable_memory(job.cluster.device))
    changes = remedies(job, pinned, least, fixed)
    pins = f" with {written(pinned)}" if pinned else ""
    return (
        f"the model does not fit: of {found.count:,} layouts{pins} the leanest needs {need} a device, and "
        f"{job.cluster.device.name} has {have} usable; {'; or '.join(changes)}"
    )
