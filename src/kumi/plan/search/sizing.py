"""How many machines a number of tokens needs in a number of days, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kumi.errors import FitError, LayoutError
from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins, bases
from kumi.plan.search.search_layouts import search
from kumi.plan.search.supported import Unsupported, accepted
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job

DAY = 86_400.0
# The most devices that are considered.
MOST_DEVICES = 65_536


@dataclass(frozen=True)
class Training:
    """What training on `tokens` tokens takes: days, device-hours, money, kWh.

    `cost` is None where the cluster has no price, `energy` where it has no watts.
    """

    tokens: float
    days: float
    device_hours: float
    cost: float | None
    energy: float | None


def training(tokens: float, best: Estimate, cluster: ClusterSpec) -> Training:
    """Return what `tokens` tokens take on all devices of `cluster` at the pace of `best`."""
    days, device = tokens / best.tokens_per_second / DAY, cluster.device
    hours = days * 24 * cluster.devices
    return Training(tokens, days, hours, hours * device.price or None, hours * device.watts / 1000 or None)


@dataclass(frozen=True)
class Size(Training):
    """What training takes on a number of nodes, with the fastest plan on them."""

    nodes: int
    devices: int
    best: Estimate


def size(job: Job, pinned: Pins, nodes: int, tokens: float, unsupported: Unsupported | None = None) -> Size | None:
    """What `tokens` tokens take on `nodes` nodes; None where no layout is legal there, or supported, or none fits."""
    job = job.on_nodes(nodes)
    found = search(job, pinned, top=1, accept=accepted(job, unsupported))
    if not found.plans:
        return None
    best = found.plans[0]
    return Size(**vars(training(tokens, best, job.cluster)), nodes=nodes, devices=job.cluster.devices, best=best)


def sizes(job: Job, pinned: Pins, tokens: float, days: float, unsupported: Unsupported | None = None) -> list[Size]:
    """Growing numbers of nodes up to the smallest that trains `tokens` tokens in `days` days, which is the last.

    Nodes are doubled until that is reached, then the gap is halved, over the numbers that have a legal layout. Raises
    FitError where no number fits the model, and LayoutError where none is fast enough before the batch has no sequence
    for a device.
    """
    tried: dict[int, Size] = {}
    for nodes in _doubling(job):
        found = size(job, pinned, nodes, tokens, unsupported)
        if found is not None:
            tried[nodes] = found
            if found.days <= days:
                break
    else:
        raise _too_slow(job, tried, days)
    between = _between(job, pinned, nodes)
    low, high = 0, len(between) - 1
    while low < high:
        middle = (low + high) // 2
        found = size(job, pinned, between[middle], tokens, unsupported)
        if found is not None:
            tried[between[middle]] = found
        low, high = (low, middle) if found is not None and found.days <= days else (middle + 1, high)
    return [tried[nodes] for nodes in sorted(tried) if nodes <= between[high]]


def _between(job: Job, pinned: Pins, nodes: int) -> list[int]:
    """At most 16 numbers of nodes above half of `nodes`, which is the last, that have a legal layout."""
    sites = job.cluster.sites
    apart = sites * max(1, nodes // (32 * sites))
    numbers = range(nodes // 2 + apart, nodes, apart)
    return [*(one for one in numbers if len(bases(job.on_nodes(one), pinned))), nodes]


def _doubling(job: Job) -> Iterator[int]:
    nodes = job.cluster.sites
    while nodes * job.cluster.devices_per_node <= MOST_DEVICES:
        yield nodes
        nodes *= 2


def _too_slow(job: Job, tried: dict[int, Size], days: float) -> FitError | LayoutError:
    if not tried:
        return FitError(
            f"no number of {job.cluster.device.name} up to {MOST_DEVICES} fits this model and batch; "
            f"see what `kumi plan` says without --days"
        )
    best = min(tried.values(), key=lambda one: one.days)
    said = f"{days:g} days are too few: the fastest is {best.days:.3g} days on {best.devices} devices"
    if 2 * best.devices > MOST_DEVICES:
        return LayoutError(f"{said}, and no more than {MOST_DEVICES} are tried; allow more days, or fewer tokens")
    return LayoutError(
        f"{said}, beyond which tokens_per_step={job.batch.tokens_per_step} has too few sequences; raise it, or allow "
        f"more days"
    )
