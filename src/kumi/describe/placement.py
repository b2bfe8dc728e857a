"""Which rank holds which coordinates, and which link every axis crosses: as data, and drawn a box a node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kumi.plan.comm import ring
from kumi.report.words import plural, rate
from kumi.spec.checks import divisors
from kumi.spec.layout import AXES
from kumi.spec.placement import EXPERT_AXES, Axis, axis, leaves_node, link

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kumi.spec.cluster import ClusterSpec
    from kumi.spec.layout import Layout

# Up to so many nodes are all drawn; of more the first few, and of a node so many ranks.
NODES, FIRST, RANKS = 8, 4, 64
# Ranks side by side in a box, and members of a group that are written out.
ACROSS, MEMBERS = 8, 6
# Axes that send the activations of every layer, and wait for them.
HEAVY = ("tp", "expert_tp")
# Axes along which ranks send to the next one, or to every other, rather than round a ring of all of them.
NO_RING = ("pp", "cp", "ep")


@dataclass(frozen=True)
class AxisPlace:
    """An axis in use: its degree, the distance of neighbours in ranks, the group of rank 0, and what its groups cross.

    `bandwidth` is what each device can send over the slowest link, and `ring` what a collective in a ring moves,
    bytes/s, the network cards of all its ranks of a node added up; None where nothing is known of links, or no ring is
    used.
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
    """Where the ranks of `layout` stand on `cluster`, as plain data; `experts`: whether the model has routed experts.

    `rules` says how a rank follows from its coordinates, for every rank; `drawn` are the nodes that are drawn.
    """
    found = [one for one in _axes(layout, experts=experts) if one.degree > 1]
    size = cluster.devices_per_node
    drawn = range(cluster.nodes if cluster.nodes <= NODES else FIRST)
    return {
        "nodes": cluster.nodes,
        "ranks_per_node": size,
        "axes": [asdict(_placed(cluster, one)) for one in found],
        "rules": _rules(found, size),
        "drawn": [
            {
                "node": node,
                "ranks": [
                    {"rank": rank} | {one.name: one.index(rank) for one in found if one.name != "zero"}
                    for rank in range(node * size, node * size + min(size, RANKS))
                ],
            }
            for node in drawn
        ],
        "warnings": list(_warnings(cluster, found)),
    }


def _axes(layout: Layout, *, experts: bool) -> Iterator[Axis]:
    """The axes that ranks communicate along, the second arrangement's where there are experts."""
    yield from (axis(layout, name) for name in AXES)
    if layout.zero > 0 and min(layout.dp_shard, layout.cp) > 1:
        yield axis(layout, "zero")
    if experts:
        yield from (axis(layout, name) for name in EXPERT_AXES)


def _placed(cluster: ClusterSpec, one: Axis) -> AxisPlace:
    import numpy as np

    name = bandwidth = pace = None
    crossed = link(cluster, one)
    if crossed is not None:
        name, bandwidth = crossed.name, crossed.bandwidth
    if crossed is not None and one.name not in NO_RING:
        pace = float(ring(cluster, np.array([float(one.stride)]), np.array([float(one.degree)]))[0][0])
    away = leaves_node(cluster, one)
    return AxisPlace(one.name, one.degree, one.stride, one.group(0), away, name, bandwidth, pace)


def _rules(found: list[Axis], size: int) -> list[str]:
    """How ranks follow from coordinates, in both arrangements."""
    rules = [_rule([one for one in found if one.name in AXES])]
    if any(one.name in ("ep", "expert_tp") for one in found):
        rules.append(_rule([one for one in found if one.name in ("pp", "dp_replicate", *EXPERT_AXES)]))
    return [*rules, f"node = rank // {size}"]


def _rule(axes: list[Axis]) -> str:
    terms = [one.name if one.stride == 1 else f"{one.stride} {one.name}" for one in axes]
    return f"rank = {' + '.join(terms) or 0}"


def _warnings(cluster: ClusterSpec, found: list[Axis]) -> Iterator[str]:
    """An axis that sends much and leaves the node over a link that is slower than the node's own."""
    size = cluster.devices_per_node
    for one in found:
        crossed, inside = link(cluster, one), link(cluster, Axis("", size, 1))
        if one.name not in HEAVY or crossed is None or not leaves_node(cluster, one):
            continue
        if inside is not None and crossed.bandwidth >= inside.bandwidth:
            continue
        instead = f" instead of {inside.name} ({rate(inside.bandwidth)})" if inside else ""
        fitting = max(degree for degree in divisors(size) if degree <= one.degree)
        use = f"{one.name} = {fitting}" + f" or another divisor of {size}" * (size > 1)
        yield (
            f"{one.name}={one.degree} leaves the node of {plural(size, 'device')}: the activations of every layer "
            f"cross {crossed.name} ({rate(crossed.bandwidth)} a device){instead}; use {use}, "
            f"and pp, cp or dp_shard across nodes"
        )


def render_placement(found: dict[str, Any]) -> RenderableType:
    """`placement`'s data for the terminal: the axes, a box a node, and the rule for the nodes that are not drawn."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text("placement", style="bold")]
    parts += [_axes_table(found)] if found["axes"] else []
    parts += [Text(f"warning: {said}", style="bold red") for said in found["warnings"]]
    parts += [Columns([_box(node, found) for node in found["drawn"]]), Text(_rest(found))]
    return Group(*parts)


def _axes_table(found: dict[str, Any]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("axis", "degree", "stride"):
        table.add_column(name, justify="left" if name == "axis" else "right")
    for name in ("ranks, such as", "crosses", "a device", "a ring"):
        table.add_column(name)
    for one in found["axes"]:
        speeds = ["" if one[speed] is None else rate(one[speed]) for speed in ("bandwidth", "ring")]
        name = "dp_shard x cp" if one["axis"] == "zero" else one["axis"]
        table.add_row(
            name,
            f"{one['degree']:,}",
            f"{one['stride']:,}",
            _members(one["group"]),
            one["link"] or "not known",
            *speeds,
        )
    return table


def _members(group: tuple[int, ...]) -> str:
    if len(group) <= MEMBERS:
        return " ".join(map(str, group))
    return f"{' '.join(map(str, group[:3]))} .. {group[-1]}"


def _box(node: dict[str, Any], found: dict[str, Any]) -> RenderableType:
    """A node: a column for every rank, a row for every axis in use."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    ranks, size = node["ranks"], found["ranks_per_node"]
    width = max(2, len(str(found["nodes"] * size - 1)))
    label = max(map(len, ranks[0]))
    rows = [
        _line(ranks[start : start + ACROSS], name, label, width)
        for start in range(0, len(ranks), ACROSS)
        for name in ranks[0]
    ]
    left = [Text(f"and {size - len(ranks):,} ranks more")] if size > len(ranks) else []
    first = node["node"] * size
    title = f"node {node['node']}: " + (f"ranks {first} to {first + size - 1}" if size > 1 else f"rank {first}")
    return Panel(Group(*rows, *left), title=title, title_align="left", expand=False)


def _line(ranks: list[dict[str, int]], name: str, label: int, width: int) -> RenderableType:
    from rich.text import Text

    cells = " ".join(f"{rank[name]:{width}}" for rank in ranks)
    return Text(f"{name:{label}} {cells}", style="bold" if name == "rank" else "", no_wrap=True)


def _rest(found: dict[str, Any]) -> str:
    """The rule, and for which nodes it stands in place of a box."""
    rule, drawn, nodes = "; ".join(found["rules"]), len(found["drawn"]), found["nodes"]
    if not found["axes"]:
        return ""
    return rule if drawn == nodes else f"nodes {drawn} to {nodes - 1:,} go on in the same way: {rule}"
