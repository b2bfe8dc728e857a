"""The process groups of a layout: their degrees, their strides and the links that they cross.

The world is laid out twice, over the same ranks, the last axis varying fastest:

    dense    pp, dp_replicate, dp_shard, cp, tp
    experts  pp, dp_replicate, expert_dp, ep, expert_tp

`ep` and `expert_tp` borrow the dp_shard x cp x tp ranks of a replica; `expert_dp` are those left, which hold the same
part of the routed experts. `zero` is dp_shard and cp taken together: the ranks that hold the same part of everything
else. So "zero" and "expert_dp" are the groups over which ZeRO divides (`sharding.zero_axis`).

`process_group` is the one table of them: the planner reads it with columns of layouts, the trainer with one layout.
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

# Of the second arrangement, what stands in place of dp_shard, cp and tp, from the outermost.
EXPERT_AXES = ("expert_dp", "ep", "expert_tp")

# Groups along several axes, the outermost first: the ranks that see different tokens and sum the gradients of the same
# weights, of all but routed experts and of these; the ranks among which every gradient is found, which sum its norm;
# and those that have parts of the same sequences.
JOINED = {
    "data": ("dp_replicate", "zero"),
    "expert_data": ("dp_replicate", "expert_dp"),
    "norm": ("pp", "zero", "tp"),
    "sequence": ("cp", "tp"),
}


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh: groups of `degree` ranks, `stride` apart from each other."""

    name: str
    degree: int
    stride: int

    def index(self, rank: int) -> int:
        """Where `rank` stands in its group."""
        return rank // self.stride % self.degree

    def group(self, rank: int) -> tuple[int, ...]:
        """The group of `rank`, itself included, in the order of their places."""
        first = rank - self.index(rank) * self.stride
        return tuple(range(first, first + self.degree * self.stride, self.stride))


def process_group(layout: Any, name: str) -> tuple[Any, Any]:
    """Return the degree of the groups `name`, and the distance of neighbours in ranks.

    `layout` is a `Layout`, or columns of layouts, whose degrees are arrays: so are then the results. `name` is one of
    `AXES`, `EXPERT_AXES` or `JOINED`, "zero", or "ends": the first and the last pipeline rank. Where ep x expert_tp
    does not divide the ranks that experts are dealt to, expert_dp is rounded down, to 1 at least.
    """
    if name in JOINED:
        return _joined([process_group(layout, axis) for axis in JOINED[name]])
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
    ranks, cut = layout.dp_shard * layout.cp * layout.tp, layout.ep * layout.expert_tp
    return ranks // cut + (ranks < cut), cut


def _joined(axes: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return degree and stride of the groups along all of `axes`, outermost first, each a degree and a stride.

    Where the groups of the outermost axis leave out ranks in between, the stride is the mean one.
    """
    degree, extent = 1, axes[-1][1]
    for size, stride in reversed(axes):
        degree = degree * size
        # The outermost axis of more than one rank decides how far the group reaches.
        extent = extent + (size > 1) * (size * stride - extent)
    return degree, extent // degree


def splits_gradients(layout: Any) -> Any:
    """True where ranks hold different parts of the gradients, so that the norm is summed over the group "norm";
    `layout` is a `Layout` or columns of layouts."""
    return (layout.zero > 0) | (layout.pp * layout.tp * layout.ep * layout.expert_tp > 1)


def axis(layout: Layout, name: str) -> Axis:
    """The groups `name` of `layout` (see `process_group`), which are evenly spaced: all but "norm".

    Raises LayoutError where ep x expert_tp does not divide the ranks that experts are dealt to.
    """
    ranks, cut = layout.dp_shard * layout.cp * layout.tp, layout.ep * layout.expert_tp
    if name in EXPERT_AXES and ranks % cut:
        raise LayoutError(
            f"ep x expert_tp = {cut} does not divide the dp_shard x cp x tp = {ranks} ranks that experts are dealt to; "
            f"use a product that does"
        )
    return Axis(name, *process_group(layout, name))


def members_of(layout: Layout, names: Sequence[str], rank: int) -> tuple[int, ...]:
    """The ranks that differ from `rank` along the axes `names` at most, in the order of their places."""
    axes = [axis(layout, name) for name in names]
    first = rank - sum(one.index(rank) * one.stride for one in axes)
    steps = product(*(range(0, one.degree * one.stride, one.stride) for one in axes))
    return tuple(first + sum(step) for step in steps)


def link(cluster: ClusterSpec, one: Axis) -> Link | None:
    """The slowest link that the groups of an axis cross; None where nothing is sent or nothing is known of links."""
    if one.degree == 1 or not cluster.links:
        return None
    return cluster.links[cluster.level(one.stride, one.degree)]


def leaves_node(cluster: ClusterSpec, one: Axis) -> bool:
    """Whether a group of the axis has ranks on several nodes."""
    size, world = cluster.devices_per_node, cluster.devices
    return any(one.index(rank) and rank // size != (rank - one.stride) // size for rank in range(world))
