"""How a plan's step time changes with the number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kumi.errors import KumiError
from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins, layout_grid
from kumi.plan.search.diagnose import UnsupportedFn, accept_supported
from kumi.plan.search.search_layouts import search
from kumi.spec.job import Job
from kumi.spec.layout import Layout

# The fields that stay as the chosen layout has them: a search over the others takes a fraction of a second.
SAME_FIELDS = ("pp", "tp", "cp", "ep", "expert_tp", "schedule", "stages", "context", "sequence_parallel")
# The interval between the larger numbers of nodes that are checked is the job's nodes divided by this.
_INTERVALS = 16


@dataclass(frozen=True)
class NodeCount:
    """The fastest layout that fits on `nodes` nodes among those with the chosen `SAME_FIELDS`; None if none fits.

    Layouts with other values of `SAME_FIELDS` may be faster, so the step time of `best` is an upper bound.
    """

    nodes: int
    devices: int
    best: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as plain data, for --json."""
        best = None if self.best is None else self.best.as_dict()
        return {"nodes": self.nodes, "devices": self.devices, "best": best}


def try_node_counts(
    job: Job, pinned: Pins, chosen: Layout, unsupported: UnsupportedFn | None = None
) -> tuple[NodeCount, ...]:
    """Return plans for half of the job's nodes, for the next larger number with a legal layout, and for their double.

    `pinned`: fields of the layout that the user has fixed. `unsupported`: reasons why a trainer does not support a
    layout; only layouts without any are searched.

    The batch stays the same. A number of nodes is left out if a cluster of so many cannot be described or searched. The
    result is empty if the links between more nodes are unknown.
    """
    if job.cluster_of_nodes is None:
        return ()
    pins = {**{name: getattr(chosen, name) for name in SAME_FIELDS}, **pinned}
    counts = (_node_count(job, pins, nodes, unsupported) for nodes in _counts(job, pins))
    return tuple(count for count in counts if count is not None)


def _counts(job: Job, pins: Pins) -> Iterator[int]:
    """Yield half of the nodes, if each site has an even number; the next larger legal number; and twice the nodes."""
    nodes, sites = job.cluster.nodes, job.cluster.sites
    if nodes % (2 * sites) == 0:
        yield nodes // 2
    interval = sites * max(1, nodes // (_INTERVALS * sites))
    legal = (count for count in range(nodes + interval, 2 * nodes, interval) if _is_legal(job, pins, count))
    yield from (count for count in (next(legal, None),) if count is not None)
    yield 2 * nodes


def _is_legal(job: Job, pins: Pins, nodes: int) -> bool:
    """Return whether a cluster of `nodes` nodes can be described and has a legal layout with `pins`."""
    try:
        return len(layout_grid(job.on_nodes(nodes), pins)) > 0
    except KumiError:
        return False


def _node_count(job: Job, pins: Pins, nodes: int, unsupported: UnsupportedFn | None) -> NodeCount | None:
    """Return the plan for `nodes` nodes; None if such a cluster cannot be described or searched."""
    try:
        other = job.on_nodes(nodes)
        result = search(other, pins, top=1, front=False, accept=accept_supported(other, unsupported))
    except KumiError:
        return None
    return NodeCount(nodes, other.cluster.devices, result.plans[0] if result.plans else None)
