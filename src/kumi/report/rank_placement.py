"""The placement of ranks: coordinates of every rank and the link that each axis crosses, as data and as a drawing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kumi.plan.time.collective_times import ring_bandwidth_latency
from kumi.report.phrases import plural, rate
from kumi.spec.divisibility import divisors
from kumi.spec.layout import AXES
from kumi.spec.process_groups import EXPERT_AXES, Axis, axis, slowest_link, spans_nodes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kumi.spec.cluster import ClusterSpec
    from kumi.spec.layout import Layout

# A cluster of up to _NODES nodes is drawn in full, of a larger one the first _FIRST nodes.
_NODES, _FIRST = 8, 4
# The most ranks of a node that are drawn, and ranks per line of its box.
_RANKS, _ACROSS = 64, 8
# The most members of a group that are all listed.
_MEMBERS = 6
# Axes whose exposed communication carries the activations of every layer.
_HEAVY = ("tp", "expert_tp")
# Axes with sends or all-to-alls instead of ring collectives.
_NO_RING = ("pp", "cp", "ep")


@dataclass(frozen=True)
class AxisPlace:
    """An axis with a degree above 1.

    `stride`: the difference in rank between neighbours.
    `group`: the ranks of rank 0's group.
    `leaves_node`: True if its groups span several nodes.
    `link`: the slowest link that the groups cross, None if unknown.
    `bandwidth`: bytes/s of each device over that link, None if unknown.
    `ring`: bytes/s of a ring collective, over the network cards of all ranks of a group in a node; None if the axis
    uses no ring.
    """

    axis: str
    degree: int
    stride: int
    group: tuple[int, ...]
    leaves_node: bool
    link: str | None
    bandwidth: float | None
    ring: float | None


def placement(layout: Layout, cluster: ClusterSpec, *, experts: bool) -> dict[str, Any]:
    """Return the placement of the ranks of `layout` on `cluster` as plain data.

    `experts`: the model has routed experts. In the result, `rules` has formulas of a rank from its coordinates, and
    `drawn` lists the nodes to draw.
    """
    axes = [item for item in _axes(layout, experts=experts) if item.degree > 1]
    size = cluster.devices_per_node
    drawn = range(cluster.nodes if cluster.nodes <= _NODES else _FIRST)
    return {
        "nodes": cluster.nodes,
        "ranks_per_node": size,
        "axes": [asdict(_axis_place(cluster, item)) for item in axes],
        "rules": _rules(axes, size),
        "drawn": [
            {
                "node": node,
                "ranks": [
                    {"rank": rank} | {item.name: item.index(rank) for item in axes if item.name != "zero"}
                    for rank in range(node * size, node * size + min(size, _RANKS))
                ],
            }
            for node in drawn
        ],
        "warnings": list(_warnings(cluster, axes)),
    }


def _axes(layout: Layout, *, experts: bool) -> Iterator[Axis]:
    """Yield the axes of communication, with `experts` also those that regroup the ranks for experts."""
    yield from (axis(layout, name) for name in AXES)
    if layout.zero > 0 and min(layout.dp_shard, layout.cp) > 1:
        yield axis(layout, "zero")
    if experts:
        yield from (axis(layout, name) for name in EXPERT_AXES)


def _axis_place(cluster: ClusterSpec, item: Axis) -> AxisPlace:
    """Return the group of rank 0 along an axis, and the link that the axis crosses."""
    import numpy as np

    name = bandwidth = ring_bandwidth = None
    crossed = slowest_link(cluster, item)
    if crossed is not None:
        name, bandwidth = crossed.name, crossed.bandwidth
    if crossed is not None and item.name not in _NO_RING:
        ring_bandwidth = float(
            ring_bandwidth_latency(cluster, np.array([float(item.stride)]), np.array([float(item.degree)]))[0][0]
        )
    across = spans_nodes(cluster, item)
    return AxisPlace(item.name, item.degree, item.stride, item.group(0), across, name, bandwidth, ring_bandwidth)


def _rules(axes: list[Axis], size: int) -> list[str]:
    """Return the formulas of a rank from its coordinates, with and without the expert axes, and of its node."""
    rules = [_rule([item for item in axes if item.name in AXES])]
    if any(item.name in ("ep", "expert_tp") for item in axes):
        rules.append(_rule([item for item in axes if item.name in ("pp", "dp_replicate", *EXPERT_AXES)]))
    return [*rules, f"node = rank // {size}"]


def _rule(axes: list[Axis]) -> str:
    """Return the formula of a rank from its coordinates along `axes`: the sum of stride x coordinate."""
    terms = [item.name if item.stride == 1 else f"{item.stride} {item.name}" for item in axes]
    return f"rank = {' + '.join(terms) or 0}"


def _warnings(cluster: ClusterSpec, axes: list[Axis]) -> Iterator[str]:
    """Warn of tensor parallelism that leaves the node over a slower link than the node's own."""
    size = cluster.devices_per_node
    for item in axes:
        crossed, inside = slowest_link(cluster, item), slowest_link(cluster, Axis("", size, 1))
        if item.name not in _HEAVY or crossed is None or not spans_nodes(cluster, item):
            continue
        if inside is not None and crossed.bandwidth >= inside.bandwidth:
            continue
        instead = f" instead of {inside.name} ({rate(inside.bandwidth)})" if inside else ""
        fitting = max(degree for degree in divisors(size) if degree <= item.degree)
        use = f"{item.name} = {fitting}" + f" or another divisor of {size}" * (size > 1)
        yield (
            f"{item.name}={item.degree} leaves the node of {plural(size, 'device')}: the activations of every layer "
            f"cross {crossed.name} ({rate(crossed.bandwidth)} per device){instead}; use {use}, "
            f"and pp, cp or dp_shard across nodes"
        )


def render_placement(data: dict[str, Any]) -> RenderableType:
    """Draw the data of `placement`: a table of the axes, a box per node, and the formulas of the remaining nodes."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text("placement", style="bold")]
    parts += [_axes_table(data)] if data["axes"] else []
    parts += [Text(f"warning: {warning}", style="bold red") for warning in data["warnings"]]
    parts += [Columns([_box(node, data) for node in data["drawn"]]), Text(_formulas(data))]
    return Group(*parts)


def _axes_table(data: dict[str, Any]) -> RenderableType:
    """Return a table with a row for each axis: its group, the link that it crosses, and the bandwidths."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("axis", "degree", "stride"):
        table.add_column(name, justify="left" if name == "axis" else "right")
    for name in ("rank 0's group", "crosses", "per device", "ring"):
        table.add_column(name)
    for item in data["axes"]:
        speeds = ["" if item[speed] is None else rate(item[speed]) for speed in ("bandwidth", "ring")]
        name = "dp_shard x cp" if item["axis"] == "zero" else item["axis"]
        table.add_row(
            name,
            f"{item['degree']:,}",
            f"{item['stride']:,}",
            _members(item["group"]),
            item["link"] or "unknown",
            *speeds,
        )
    return table


def _members(group: tuple[int, ...]) -> str:
    """Return the ranks of a group; of a large group the first three and the last."""
    if len(group) <= _MEMBERS:
        return " ".join(map(str, group))
    return f"{' '.join(map(str, group[:3]))} .. {group[-1]}"


def _box(node: dict[str, Any], data: dict[str, Any]) -> RenderableType:
    """Draw a node: a column per rank, a row per axis."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    ranks, size = node["ranks"], data["ranks_per_node"]
    width = max(2, len(str(data["nodes"] * size - 1)))
    label = max(map(len, ranks[0]))
    rows = [
        _line(ranks[start : start + _ACROSS], name, label, width)
        for start in range(0, len(ranks), _ACROSS)
        for name in ranks[0]
    ]
    omitted = [Text(f"and {size - len(ranks):,} more ranks")] if size > len(ranks) else []
    first = node["node"] * size
    title = f"node {node['node']}: " + (f"ranks {first} to {first + size - 1}" if size > 1 else f"rank {first}")
    return Panel(Group(*rows, *omitted), title=title, title_align="left", expand=False)


def _line(ranks: list[dict[str, int]], name: str, label: int, width: int) -> RenderableType:
    """Return a line of a node's box: the coordinate `name` of `ranks`; `label` and `width` are widths in letters."""
    from rich.text import Text

    cells = " ".join(f"{rank[name]:{width}}" for rank in ranks)
    return Text(f"{name:{label}} {cells}", style="bold" if name == "rank" else "", no_wrap=True)


def _formulas(data: dict[str, Any]) -> str:
    """Return the formulas of rank and node, and the range of nodes that are not drawn."""
    rules, drawn, nodes = "; ".join(data["rules"]), len(data["drawn"]), data["nodes"]
    if not data["axes"]:
        return ""
    return rules if drawn == nodes else f"nodes {drawn} to {nodes - 1:,} follow the same pattern: {rules}"
