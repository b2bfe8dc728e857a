"""Why there is no plan: illegal pins, a trainer that does not support them, or too little memory; and remedies.

Each explanation is one sentence for an error message, with the values in question and a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from kumi.errors import LayoutError
from kumi.plan.estimate import estimate
from kumi.plan.estimates import Estimate
from kumi.plan.memory import device_memory
from kumi.plan.search.candidates import Pins
from kumi.plan.search.search_layouts import AcceptFn, SearchResult, estimate_smallest
from kumi.spec.checks import illegal
from kumi.spec.job import Job
from kumi.spec.layout import RECOMPUTE, Layout
from kumi.spec.schedules import DEFAULT, SCHEDULES
from kumi.units import format_bytes

# Returns all reasons why a trainer does not support a layout of a job: an empty list if the trainer supports it.
UnsupportedFn = Callable[[Job, Layout], list[str]]

# How often to double the number of nodes in search of one that is enough.
_DOUBLINGS = 10

# Values to try for fields that are not pinned. A reason that holds for all combinations is taken to hold for all
# layouts.
_OPEN_VALUES: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2),
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2),
    "cp": (1, 2),
    "tp": (1, 2),
    "ep": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
}


# Illegal pins


def explain_illegal(job: Job, pinned: Pins) -> str:
    """Return why no legal layout agrees with `pinned`."""
    reasons = illegal(job.model, layout_from_pins(job, pinned), job.cluster, job.batch)
    if not reasons and pinned.get("pp") == 1 and pinned.get("schedule", DEFAULT) != DEFAULT:
        reasons = [
            f"layout.schedule={pinned['schedule']} orders a pipeline, but layout.pp=1 has none; "
            f"do not pin one of them, or pin layout.pp = 2 or more"
        ]
    if reasons:
        return summarize_reasons(reasons, pinned)
    return f"no legal layout of {job.cluster.devices} devices agrees with {_format_pins(pinned)}; pin fewer fields"


def summarize_reasons(reasons: Sequence[str], pinned: Pins) -> str:
    """Return the first reason for each pinned field, and the number of the other reasons.

    If no reason is about a pinned field, return the first reason. One wrong degree often violates many rules.
    """
    first = [next((reason for reason in reasons if reason.startswith(f"{name}=")), None) for name in pinned]
    shown = list(dict.fromkeys(reason for reason in first if reason is not None)) or list(reasons[:1])
    more = len(reasons) - len(shown)
    return "; ".join(shown) + (f" (and {more} more reason{'s' * (more > 1)} that may follow from it)" if more else "")


def layout_from_pins(job: Job, pinned: Pins) -> Layout:
    """Return the layout with the pinned fields, and data parallelism over the remaining devices.

    Fields that follow from the pins are set, too: ZeRO-1 if states are sharded over `dp_shard`, and the number of
    stages that a schedule needs.
    """
    fields: dict[str, Any] = {name: tuple(value) if name == "stage_layers" else value for name, value in pinned.items()}
    if "stages" not in pinned and fields.get("schedule") in SCHEDULES:
        fields["stages"] = SCHEDULES[fields["schedule"]].stages
    layout = Layout(**fields)
    remaining = max(1, job.cluster.devices // layout.world_size)
    replicate = "dp_shard" in pinned or ("dp_replicate" not in pinned and pinned.get("zero") == 0)
    if replicate and "dp_replicate" not in pinned:
        layout = replace(layout, dp_replicate=remaining)
    elif not replicate:
        layout = replace(layout, dp_shard=remaining)
    sharded = layout.dp_shard > 1 and "zero" not in pinned
    return replace(layout, zero=1) if sharded else layout


def _format_pins(pinned: Pins) -> str:
    return ", ".join(f"layout.{name}={value}" for name, value in pinned.items()) or "no pinned field"


# Layouts that a trainer does not support


def accept_supported(job: Job, unsupported: UnsupportedFn | None) -> AcceptFn | None:
    """Return a function that is True for the layouts of `job` without reasons; None if any layout is supported."""
    return None if unsupported is None else lambda layout: not unsupported(job, layout)


def require_supported(job: Job, pinned: Pins, unsupported: UnsupportedFn) -> None:
    """Raise LayoutError if the trainer supports no layout of `job` that agrees with `pinned`.

    A few layouts are checked, before millions are searched.
    """
    layout = layout_from_pins(job, pinned)
    names = [name for name in _OPEN_VALUES if name not in pinned]
    reasons = [
        dict.fromkeys(unsupported(job, replace(layout, **dict(zip(names, values, strict=True)))))
        for values in product(*(_OPEN_VALUES[name] for name in names))
    ]
    common = [reason for reason in reasons[0] if all(reason in others for others in reasons)]
    if common:
        raise LayoutError(f"{job.engine.name} supports no layout of this job: {'; '.join(common)}")


def explain_none_supported(job: Job, fastest: Layout, unsupported: UnsupportedFn) -> str:
    """Return why the trainer supports none of the layouts that fit, with its reasons against the `fastest`."""
    return (
        f"{job.engine.name} supports none of the layouts that fit, for example not the fastest: "
        f"{'; '.join(unsupported(job, fastest))}; pin fields to values that {job.engine.name} supports, or change the "
        f"job so that more layouts fit"
    )


# Too little memory


def explain_no_fit(job: Job, pinned: Pins, result: SearchResult, fixed: Pins = MappingProxyType({})) -> str:
    """Return why no layout fits, and the smallest changes that would make one fit.

    `fixed`: fields that the search could not choose either, but that the user did not pin.
    """
    if result.smallest is None:
        return explain_small_hosts(job, pinned["offload"])
    least = estimate(job, result.smallest)
    need, usable = format_bytes(least.peak_memory), format_bytes(device_memory.usable_memory(job))
    changes = remedies(job, pinned, least, fixed)
    pins = f" with {_format_pins(pinned)}" if pinned else ""
    return (
        f"the model does not fit: of {result.count:,} layouts{pins}, the smallest needs {need} per device, and "
        f"{job.cluster.device.name} has {usable} usable; {'; or '.join(changes)}"
    )


def explain_small_hosts(job: Job, offload: object) -> str:
    """Return that the hosts of `job` are too small for layouts with `offload`, and what to change."""
    host = job.cluster.host
    return (
        f"layout.offload={offload} needs more than the hosts have, {format_bytes(host.memory)} of memory per node and "
        f"{format_bytes(host.nvme)} on drives; offload less, or use more nodes"
    )


def remedies(job: Job, pinned: Pins, least: Estimate, fixed: Pins) -> list[str]:
    """Return the smallest changes that would make a layout fit, each sufficient alone.

    They are removing a pin, more nodes (if the network between them is known), shorter sequences, describing the host,
    and larger devices. `least` is the estimate with the least memory. The `fixed` fields stay as they are when a pin is
    removed.
    """
    constraints = {**pinned, **fixed}
    changes = [
        *_unpin(job, pinned, fixed),
        *_more_nodes(job, constraints),
        *_shorter_sequences(job, constraints),
        *_describe_host(job, constraints),
    ]
    needed = least.peak_memory / max(1, least.usable) * job.cluster.device.memory
    device = f"use devices of {format_bytes(needed)} or more instead of {format_bytes(job.cluster.device.memory)}"
    return [*changes, device]


def any_layout_fits(job: Job, pinned: Pins) -> bool:
    """Return whether some layout of `job` fits.

    A layout that fits also fits with microbatches of one sequence. ZeRO-1 is the exception: its unsharded gradients
    accumulate over several microbatches.
    """
    small = {} if pinned.get("zero") == 1 else {"microbatch": 1}
    smallest = estimate_smallest(job, {**small, **pinned})
    return smallest is not None and smallest.fits


def _unpin(job: Job, pinned: Pins, fixed: Pins) -> Iterator[str]:
    """Yield the first pin that makes a layout fit when it is removed."""
    for name, value in pinned.items():
        others = {key: other for key, other in pinned.items() if key != name} | dict(fixed)
        if any_layout_fits(job, others):
            yield f"do not pin layout.{name}={value}"
            return


def _more_nodes(job: Job, pinned: Pins) -> Iterator[str]:
    """Yield the first doubled number of nodes on which a layout fits."""
    for _ in range(_DOUBLINGS if job.cluster_of_nodes else 0):
        device, nodes = job.cluster.device, 2 * job.cluster.nodes
        job = job.on_nodes(nodes)
        job = replace(job, cluster=replace(job.cluster, device=device))
        if job.cluster.devices > job.batch.sequences * 64:  # far more devices than a step keeps busy
            return
        if any_layout_fits(job, pinned):
            yield f"set cluster.nodes={nodes} ({job.cluster.devices} devices)"
            return


def _shorter_sequences(job: Job, pinned: Pins) -> Iterator[str]:
    """Yield the first halved sequence length with which a layout fits, if it has 256 tokens or more."""
    seq_len = job.batch.seq_len
    while seq_len > 512:
        seq_len //= 2
        if any_layout_fits(replace(job, batch=replace(job.batch, seq_len=seq_len)), pinned):
            yield f"shorten batch.seq_len from {job.batch.seq_len} to {seq_len}"
            return


def _describe_host(job: Job, pinned: Pins) -> Iterator[str]:
    """Yield advice to describe the host, if the cluster file does not and offloading to a typical host would fit."""
    host = job.cluster.host
    if (host.memory and host.device_bandwidth) or pinned.get("offload") == "none":
        return
    typical = replace(host, memory=2**41, device_bandwidth=25e9)
    if any_layout_fits(replace(job, cluster=replace(job.cluster, host=typical)), pinned):
        yield "describe the host's memory and its link in the cluster file, so that states can be offloaded to it"
