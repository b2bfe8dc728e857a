"""The drawing of ranks on nodes: every rank in its box, the rule for the rest, warnings only where they are due."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from kumi.report.rank_placement import placement, render_placement
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.layout import AXES, Layout
from kumi.spec.process_groups import EXPERT_AXES, axis
from rank_groups import coords

INSIDE, NETWORK = Link("inside", 8, 100e9, 0.0, 0.8), Link("network", 2**15, 10e9, 0.0, 0.5)
LAYOUTS = [
    Layout(),
    Layout(pp=2, tp=8),
    Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2, expert_tp=2, zero=3),
    Layout(pp=16, dp_replicate=4, dp_shard=8, cp=4, tp=8, zero=3),
]


def cluster(layout, per_node=8, links=(INSIDE, NETWORK)):
    per_node = min(per_node, layout.world_size)
    return ClusterSpec("test", Device("d", "cuda", 0), per_node, layout.world_size // per_node, links=links)


def drawn(placed, width=120, *, ascii_only=False):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii_only else "utf-8")
    Console(file=out, width=width).print(render_placement(placed))
    out.flush()
    return out.buffer.getvalue().decode()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_coordinates_of_the_layout(layout):
    for node in placement(layout, cluster(layout), experts=True)["drawn"]:
        for rank in node["ranks"]:
            where = coords(layout, rank["rank"])
            assert {name: index for name, index in where.items() if index} == {
                name: index for name, index in rank.items() if index and name != "rank"
            }
            assert rank["rank"] // cluster(layout).devices_per_node == node["node"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rules_give_the_rank_of_all_coordinates(layout):
    placed = placement(layout, cluster(layout), experts=True)
    *rules, node = placed["rules"]
    for rank in range(0, layout.world_size, max(1, layout.world_size // 97)):
        where = coords(layout, rank)
        for rule in rules:
            formula = re.sub(r"(\d+) (\w+)", r"\1 * \2", rule.removeprefix("rank = "))
            assert eval(formula, {}, where) == rank
        assert eval(node.removeprefix("node = "), {}, {"rank": rank}) == rank // placed["ranks_per_node"]


def test_axes_in_use_have_their_links():
    layout = Layout(dp_shard=2, cp=2, tp=4, zero=3, ep=4)
    axes = {one["axis"]: one for one in placement(layout, cluster(layout), experts=True)["axes"]}
    assert set(axes) == {"dp_shard", "cp", "tp", "zero", "expert_dp", "ep"}
    assert {name: one["link"] for name, one in axes.items()} == {
        "dp_shard": "network",
        "cp": "inside",
        "tp": "inside",
        "zero": "network",
        "expert_dp": "network",
        "ep": "inside",
    }
    # Two ranks of the group stand on each node, with a network card each; a single one has its own.
    assert axes["zero"]["ring"] == 2 * NETWORK.bandwidth * NETWORK.efficiency
    assert axes["dp_shard"]["ring"] == NETWORK.bandwidth * NETWORK.efficiency
    assert axes["ep"]["ring"] is None
    for name, entry in axes.items():
        assert entry["group"] == axis(layout, name).group(0)


def test_without_experts_only_the_dense_arrangement_is_shown():
    layout = Layout(dp_shard=4, tp=2, zero=1)
    assert {one["axis"] for one in placement(layout, cluster(layout), experts=False)["axes"]} == {"dp_shard", "tp"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_drawn_rank_is_in_its_box(layout):
    placed = placement(layout, cluster(layout), experts=True)
    text = drawn(placed)
    shown = [int(number) for line in re.findall(r"│ rank +([\d ]+)│", text) for number in line.split()]
    assert sorted(shown) == [rank["rank"] for node in placed["drawn"] for rank in node["ranks"]]
    assert all(len(line) <= 120 for line in text.splitlines())
    for entry in placed["axes"]:
        assert entry["axis"] == "zero" or entry["axis"] in text


def test_many_nodes_are_drawn_by_their_first_and_a_rule():
    layout = Layout(pp=16, dp_replicate=16, dp_shard=8, tp=8, zero=3)
    assert layout.world_size == 16_384
    text = drawn(placement(layout, cluster(layout), experts=False), width=80)
    assert "node 3: ranks 24 to 31" in text
    assert "node 4:" not in text
    words = " ".join(text.split())
    assert "nodes 4 to 2,047 follow the same pattern: rank = 1024 pp + 64 dp_replicate + 8 dp_shard + tp; node" in words
    assert len(text.splitlines()) < 60


def test_a_node_of_very_many_ranks_is_cut_short():
    layout = Layout(dp_replicate=1024)
    text = drawn(placement(layout, cluster(layout, per_node=1024), experts=False))
    assert "and 960 more ranks" in text


def test_boxes_are_drawn_where_there_is_only_ascii():
    layout = Layout(pp=2, tp=8)
    assert "| tp    0  1  2  3  4  5  6  7 |" in drawn(
        placement(layout, cluster(layout), experts=False), ascii_only=True
    )


def test_tensor_parallelism_that_leaves_the_node_is_warned_of():
    layout = Layout(tp=16)
    placed = placement(layout, cluster(layout), experts=False)
    (warning,) = placed["warnings"]
    assert "tp=16 leaves the node of 8 devices" in warning
    assert "cross network (10.0 GB/s per device) instead of inside (100 GB/s)" in warning
    assert "use tp = 8" in warning
    assert "warning: tp=16" in drawn(placed)


def test_experts_cut_over_nodes_are_warned_of():
    layout = Layout(dp_shard=16, expert_tp=16, zero=1)
    assert ["expert_tp=16 leaves" in said for said in placement(layout, cluster(layout), experts=True)["warnings"]] == [
        True
    ]


@pytest.mark.parametrize("layout", [Layout(pp=2, tp=8), Layout(dp_replicate=16)])
def test_there_is_no_warning_where_tensor_parallelism_stays_inside(layout):
    assert placement(layout, cluster(layout), experts=False)["warnings"] == []


def test_there_is_no_warning_where_the_fast_link_spans_nodes():
    layout, domain = Layout(tp=16), Link("domain", 64, 100e9, 0.0)
    assert placement(layout, cluster(layout, per_node=4, links=(domain, NETWORK)), experts=False)["warnings"] == []


def test_nothing_is_said_of_links_that_are_not_known():
    layout = Layout(dp_replicate=4, tp=2)
    placed = placement(layout, cluster(layout, per_node=4, links=()), experts=False)
    assert all(one["link"] is one["bandwidth"] is one["ring"] is None for one in placed["axes"])
    assert "unknown" in drawn(placed)


def test_axes_are_those_of_both_arrangements():
    assert set(coords(Layout(), 0)) == {*AXES, *EXPERT_AXES}


def test_a_node_of_one_device_has_no_room_for_a_group():
    layout = Layout(tp=2)
    (warning,) = placement(layout, cluster(layout, per_node=1, links=(NETWORK,)), experts=False)["warnings"]
    assert "tp=2 leaves the node of 1 device: " in warning
    assert warning.endswith("; use tp = 1, and pp, cp or dp_shard across nodes")
