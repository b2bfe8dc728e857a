"""Which ranks communicate along every axis, those of experts included, and which link each group crosses.

The world is laid out twice, over the same ranks, the last axis varying fastest:

    dense    pp, dp_replicate, dp_shard, cp, tp
    experts  pp, dp_replicate, expert_dp, ep, expert_tp

`ep` and `expert_tp` borrow the dp_shard x cp x tp ranks of a replica; `expert_dp` are those left, which hold the same
part of the routed experts. `zero` is dp_shard and cp taken together: the ranks that hold the same part of everything
else. So "zero" and "expert_dp" are the groups over which ZeRO divides (`sharding.zero_degree`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kumi.errors import LayoutError
from kumi.spec.cluster import ClusterSpec, Link
from kumi.spec.layout import AXES, Layout

# Of the second arrangement, what stands in place of dp_shard, cp and tp, from the outermost.
EXPERT_AXES = ("expert_dp", "ep", "expert_tp")


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


def axis(layout: Layout, name: str) -> Axis:
    """The axis `name` of `layout`: one of `AXES` or `EXPERT_AXES`, or "zero".

    Raises LayoutError where ep x expert_tp does not divide the ranks that experts are dealt to.
    """
    if name in AXES:
        return Axis(name, getattr(layout, name), layout.stride(name))
    if name == "zero":
        return Axis(name, layout.dp_shard * layout.cp, layout.tp)
    ranks, cut = layout.dp_shard * layout.cp * layout.tp, layout.ep * layout.expert_tp
    if ranks % cut:
        raise LayoutError(
            f"ep x expert_tp = {cut} does not divide the dp_shard x cp x tp = {ranks} ranks that experts are dealt to; "
            f"use a product that does"
        )
    found = {"expert_tp": (layout.expert_tp, 1), "ep": (layout.ep, layout.expert_tp), "expert_dp": (ranks // cut, cut)}
    return Axis(name, *found[name])


def link(cluster: ClusterSpec, one: Axis) -> Link | None:
    """The slowest link that the groups of an axis cross; None where nothing is sent or nothing is known of links."""
    if one.degree == 1 or not cluster.links:
        return None
    return cluster.links[cluster.level(one.stride, one.degree)]


def leaves_node(cluster: ClusterSpec, one: Axis) -> bool:
    """Whether a group of the axis has ranks on several nodes."""
    size, world = cluster.devices_per_node, cluster.devices
    return any(one.index(rank) and rank // size != (rank - one.stride) // size for rank in range(world))
