"""The number of nodes that trains a number of tokens in a number of days, and the cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kumi.errors import FitError, LayoutError
from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins, layout_grid
from kumi.plan.search.diagnose import UnsupportedFn, accept_supported
from kumi.plan.search.search_layouts import search
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job

DAY_SECONDS = 86_400.0
# Function that shows the fraction done and a note (`kumi.progress.Update`).
ProgressFn = Callable[..., None]
# The most devices to consider.
_MAX_DEVICES = 65_536


@dataclass(frozen=True)
class TrainingCost:
    """The cost of training on `tokens` tokens: days, device-hours, money, kWh.

    `cost` is None if the cluster has no price, `energy` if it has no watts.
    """

    tokens: float
    days: float
    device_hours: float
    cost: float | None
    energy: float | None


def training_cost(tokens: float, best: Estimate, cluster: ClusterSpec) -> TrainingCost:
    """Return the cost of training on `tokens` tokens with the plan `best` on all devices of `cluster`."""
    days, device = tokens / best.tokens_per_second / DAY_SECONDS, cluster.device
    hours = days * 24 * cluster.devices
    return TrainingCost(tokens, days, hours, hours * device.price or None, hours * device.watts / 1000 or None)


@dataclass(frozen=True)
class ClusterSize(TrainingCost):
    """The cost of training on a number of nodes, with the fastest plan for them."""

    nodes: int
    devices: int
    best: Estimate


def plan_on_nodes(
    job: Job,
    pinned: Pins,
    nodes: int,
    tokens: float,
    unsupported: UnsupportedFn | None = None,
    progress: ProgressFn | None = None,
) -> ClusterSize | None:
    """Return the cost of `tokens` tokens on `nodes` nodes; None if no layout is legal, supported and fits.

    `progress`: called with the fraction done, 0 to 1, and the number of nodes as text.
    """
    job = job.on_nodes(nodes)
    show = None if progress is None else partial(progress, note=f"{nodes} nodes")
    result = search(job, pinned, top=1, front=False, accept=accept_supported(job, unsupported), progress=show)
    if not result.plans:
        return None
    best = result.plans[0]
    cost = training_cost(tokens, best, job.cluster)
    return ClusterSize(**vars(cost), nodes=nodes, devices=job.cluster.devices, best=best)


def search_cluster_sizes(
    job: Job,
    pinned: Pins,
    tokens: float,
    days: float,
    unsupported: UnsupportedFn | None = None,
    progress: ProgressFn | None = None,
) -> list[ClusterSize]:
    """Return increasing cluster sizes; the last is the smallest that trains `tokens` tokens in `days` days.

    The number of nodes is doubled until it is large enough. A bisection follows, over the numbers of nodes that have a
    legal layout. `progress`: as in `plan_on_nodes`, from 0 to 1 for each number of nodes.

    Raise FitError if the model fits on no number of nodes, and LayoutError if none is fast enough before the batch has
    fewer sequences than devices.
    """
    tried: dict[int, ClusterSize] = {}
    for nodes in _doubled_nodes(job):
        size = plan_on_nodes(job, pinned, nodes, tokens, unsupported, progress)
        if size is not None:
            tried[nodes] = size
            if size.days <= days:
                break
    else:
        raise _too_slow(job, tried, days)
    choices = _nodes_to_bisect(job, pinned, nodes)
    low, high = 0, len(choices) - 1
    while low < high:
        middle = (low + high) // 2
        size = plan_on_nodes(job, pinned, choices[middle], tokens, unsupported, progress)
        if size is not None:
            tried[choices[middle]] = size
        low, high = (low, middle) if size is not None and size.days <= days else (middle + 1, high)
    return [tried[nodes] for nodes in sorted(tried) if nodes <= choices[high]]


def _nodes_to_bisect(job: Job, pinned: Pins, nodes: int) -> list[int]:
    """Return at most 16 numbers of nodes with a legal layout, all above half of `nodes`; the last is `nodes`."""
    sites = job.cluster.sites
    interval = sites * max(1, nodes // (32 * sites))
    numbers = range(nodes // 2 + interval, nodes, interval)
    return [*(number for number in numbers if len(layout_grid(job.on_nodes(number), pinned))), nodes]


def _doubled_nodes(job: Job) -> Iterator[int]:
    """Yield one node per site, then twice as many each time, up to `_MAX_DEVICES` devices."""
    nodes = job.cluster.sites
    while nodes * job.cluster.devices_per_node <= _MAX_DEVICES:
        yield nodes
        nodes *= 2


def _too_slow(job: Job, tried: dict[int, ClusterSize], days: float) -> FitError | LayoutError:
    """Return the error for a search without a large enough number of nodes."""
    if not tried:
        return FitError(
            f"this model and batch fit on no number of {job.cluster.device.name} devices up to {_MAX_DEVICES}; "
            f"run `kumi plan` without --days to see why"
        )
    best = min(tried.values(), key=lambda size: size.days)
    fastest = f"--days {days:g} is too short: the fastest is {best.days:.3g} days on {best.devices} devices"
    if 2 * best.devices > _MAX_DEVICES:
        return LayoutError(f"{fastest}, and a search takes at most {_MAX_DEVICES}; allow more days, or fewer tokens")
    return LayoutError(
        f"{fastest}, and tokens_per_step={job.batch.tokens_per_step} has too few sequences for more devices; raise "
        f"it, or allow more days"
    )
