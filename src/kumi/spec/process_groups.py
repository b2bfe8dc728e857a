"""The process groups of a layout: their degrees, their strides and the links that they cross.

The same ranks are arranged twice; the last axis varies fastest:

    dense    pp, dp_replicate, dp_shard, cp, tp
    experts  pp, dp_replicate, expert_dp, ep, expert_tp

The experts' arrangement uses the dp_shard x cp x tp ranks of a replica for `ep`, `expert_tp` and `expert_dp`; the ranks
of `expert_dp` hold the same shard of the routed experts. `zero` combines dp_shard and cp: its ranks hold the same shard
of all other parameters. ZeRO therefore shards over "zero" and "expert_dp" (`sharding.zero_axis`).

`process_group` is the only table of groups. The planner reads it with arrays of layouts, the trainer with one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from kumi.errors import LayoutError
from kumi.spec.cluster import ClusterSpec, Link
from kumi.spec.layout import AXES, Layout

# The axes of the experts' arrangement in place of dp_shard, cp and tp, from the outermost.
EXPERT_AXES = ("expert_dp", "ep", "expert_tp")

# Name of a group along several axes -> these axes, the outermost first. "data" and "expert_data": ranks that reduce the
# gradients of dense parameters and of routed experts. "norm": ranks that together hold all gradients and sum the norm.
# "sequence": ranks with parts of the same sequences.
COMBINED_AXES = {
    "data": ("dp_replicate", "zero"),
    "expert_data": ("dp_replicate", "expert_dp"),
    "norm": ("pp", "zero", "tp"),
    "sequence": ("cp", "tp"),
}


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh: groups of `degree` ranks, with a distance of `stride` between neighbours."""

    name: str
    degree: int
    stride: int

    def index(self, rank: int) -> int:
        """Return the index of `rank` in its group."""
        return rank // self.stride % self.degree

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of `rank`, itself included, in ascending order."""
        first = rank - self.index(rank) * self.stride
        return tuple(range(first, first + self.degree * self.stride, self.stride))


def process_group(layout: Any, name: str) -> tuple[Any, Any]:
    """Return the degree of the groups `name`, and their stride: the distance of neighbours in ranks.

    `layout` is a `Layout`, or a `kumi.plan.layout_batch.LayoutBatch`: then the results are arrays. `name` is one of
    `AXES`, `EXPERT_AXES` or `COMBINED_AXES`, "zero", or "ends" (the first and the last pipeline rank). If ep x
    expert_tp does not divide the ranks that share the experts, expert_dp is rounded down, to at least 1.
    """
    if name in COMBINED_AXES:
        return _joined([process_group(layout, axis) for axis in COMBINED_AXES[name]])
    if name in AXES:
        inner = AXES[AXES.index(name) + 1 :]
        return getattr(layout, name), prod(getattr(layout, axis) for axis in inner)
    if name == "zero":
        return layout.dp_shard * layout.cp, layout.tp
    if name == "ends":
        return 2, (layout.pp - 1) * process_group(layout, "pp")[1]
    if name == "expert_tp":
        return layout.expert_tp, 1
    if name == "ep":
        return layout.ep, layout.expert_tp
    if name != "expert_dp":
        raise ValueError(f"no process group has the name {name!r}")
    ranks, expert_ranks = layout.dp_shard * layout.cp * layout.tp, layout.ep * layout.expert_tp
    return ranks // expert_ranks + (ranks < expert_ranks), expert_ranks


def _joined(axes: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return degree and stride of the groups along all `axes`: (degree, stride) pairs, the outermost first.

    The stride is the mean if the groups of the outermost axis skip ranks.
    """
    degree, extent = 1, axes[-1][1]
    for axis_degree, stride in reversed(axes):
        degree = degree * axis_degree
        # The outermost axis with more than one rank sets the extent of the group.
        extent = extent + (axis_degree > 1) * (axis_degree * stride - extent)
    return degree, extent // degree


def has_sharded_grads(layout: Any) -> Any:
    """True where ranks hold different parts of the gradients, so that the norm is summed over the group "norm".

    `layout` is a `Layout`, or a `kumi.plan.layout_batch.LayoutBatch`: then the result is an array.
    """
    return (layout.zero > 0) | (layout.pp * layout.tp * layout.ep * layout.expert_tp > 1)


def axis(layout: Layout, name: str) -> Axis:
    """Return the axis `name` of `layout` (see `process_group`). Not for "norm": its ranks are not evenly spaced.

    Raise LayoutError if ep x expert_tp does not divide the ranks that share the experts.
    """
    ranks, expert_ranks = layout.dp_shard * layout.cp * layout.tp, layout.ep * layout.expert_tp
    if name in EXPERT_AXES and ranks % expert_ranks:
        raise LayoutError(
            f"ep x expert_tp = {expert_ranks} does not divide the dp_shard x cp x tp = {ranks} ranks that share the "
            f"experts; choose a product that divides it"
        )
    return Axis(name, *process_group(layout, name))


def members_of(layout: Layout, names: Sequence[str], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` only along the axes `names`, in ascending order."""
    axes = [axis(layout, name) for name in names]
    first = rank - sum(group.index(rank) * group.stride for group in axes)
    steps = product(*(range(0, group.degree * group.stride, group.stride) for group in axes))
    return tuple(first + sum(step) for step in steps)


def slowest_link(cluster: ClusterSpec, group: Axis) -> Link | None:
    """Return the slowest link inside the groups of the axis `group`; None without messages or with unknown links."""
    if group.degree == 1 or not cluster.links:
        return None
    return cluster.links[cluster.level(group.stride, group.degree)]


def spans_nodes(cluster: ClusterSpec, group: Axis) -> bool:
    """True if a group of the axis `group` has ranks on several nodes."""
    size, world = cluster.devices_per_node, cluster.devices
    return any(group.index(rank) and rank // size != (rank - group.stride) // size for rank in range(world))
