"""Groups of ranks partition the world, and agree with how parameters are divided."""

from __future__ import annotations

import numpy as np
import pytest

from kumi.errors import LayoutError
from kumi.plan.layout_batch import batch_layouts
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.layout import AXES, Layout
from kumi.spec.process_groups import (
    COMBINED_AXES,
    EXPERT_AXES,
    axis,
    members_of,
    process_group,
    slowest_link,
    spans_nodes,
)
from kumi.spec.sharding import zero_axis, zero_degree
from rank_groups import coords, groups, groups_by_coords

LAYOUTS = [
    Layout(),
    Layout(dp_replicate=4),
    Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2, zero=3),
    Layout(dp_shard=8, ep=4, zero=3),
    Layout(dp_shard=4, tp=2, ep=4, zero=3),
    Layout(dp_shard=2, tp=4, ep=2, expert_tp=2, zero=1),
    Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2, expert_tp=2, zero=3),
    Layout(dp_shard=2, cp=2, tp=2, ep=8, zero=3),
]
NAMES = (*AXES, *EXPERT_AXES, "zero")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_partition_the_ranks(layout, name):
    by_coords, joined = groups(layout, name), axis(layout, name)
    assert sorted(rank for group in by_coords for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in by_coords} == {joined.degree}
    for group in by_coords:
        assert [joined.index(rank) for rank in group] == list(range(joined.degree))
        assert all(joined.group(rank) == group for rank in group)


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_group_of_a_dense_axis_differ_in_that_coordinate_alone(layout, name):
    assert groups(layout, name) == groups_by_coords(layout, name)


@pytest.mark.parametrize("arrangement", [AXES, ("pp", "dp_replicate", *EXPERT_AXES)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_has_a_place_of_its_own_in_both_arrangements(layout, arrangement):
    places = {tuple(coords(layout, rank)[name] for name in arrangement) for rank in range(layout.world_size)}
    assert len(places) == layout.world_size


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "routed"), [("zero", False), ("expert_dp", True)])
def test_what_zero_divides_is_divided_over_its_group_in_order(layout, name, routed):
    zero = zero_axis(layout, routed=routed)
    assert (zero, zero.degree) == (axis(layout, name), zero_degree(layout, routed=routed))
    parts = layout.ep * layout.expert_tp if routed else layout.tp
    for group in groups(layout, name):
        places = [layout.coords(rank) for rank in group]
        inside = [(place["dp_shard"] * layout.cp + place["cp"]) * layout.tp + place["tp"] for place in places]
        assert [place // parts for place in inside] == list(range(zero.degree))
        assert len({(place["pp"], place["dp_replicate"]) for place in places}) == 1


@pytest.mark.parametrize("name", ["data", "expert_data", "sequence"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined_groups_have_the_ranks_of_all_their_axes(layout, name):
    joined = axis(layout, name)
    for rank in range(layout.world_size):
        assert joined.group(rank) == members_of(layout, COMBINED_AXES[name], rank)


def test_the_norm_is_summed_over_stages_with_copies_between_them():
    layout = Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2, zero=3)
    degree, stride = process_group(layout, "norm")
    assert (degree, stride) == (len(members_of(layout, COMBINED_AXES["norm"], 0)), 2)
    assert process_group(Layout(dp_replicate=2, dp_shard=3, zero=3), "norm") == (3, 1)


def test_the_ends_of_a_pipeline_are_its_first_and_its_last_rank():
    layout = Layout(pp=4, dp_shard=2, tp=2, zero=1)
    assert axis(layout, "ends").group(1) == (1, 13)


@pytest.mark.parametrize("name", [*NAMES, *COMBINED_AXES, "ends"])
def test_columns_have_the_groups_of_each_of_their_layouts(name):
    several = [layout for layout in LAYOUTS if layout.pp > 1 or name != "ends"]
    columns = [np.broadcast_to(part, len(several)) for part in process_group(batch_layouts(several), name)]
    assert [tuple(pair) for pair in np.transpose(columns)] == [process_group(layout, name) for layout in several]


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="no process group has the name 'dp'"):
        process_group(Layout(), "dp")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_an_expert_are_neighbours_and_data_ranks_far(layout):
    assert axis(layout, "expert_tp").stride <= axis(layout, "ep").stride <= axis(layout, "expert_dp").stride


def test_experts_borrow_from_data_context_and_tensor_ranks():
    layout = Layout(dp_shard=2, cp=2, tp=2, ep=2, expert_tp=2, zero=3)
    assert groups(layout, "expert_tp")[0] == (0, 1)
    assert groups(layout, "ep")[0] == (0, 2)
    assert groups(layout, "expert_dp")[0] == (0, 4)


def test_a_product_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(LayoutError, match="ep x expert_tp = 4 does not divide the dp_shard x cp x tp = 6"):
        groups(Layout(dp_shard=6, ep=4, zero=1), "ep")


def _cluster(nodes, per_node=8):
    links = (Link("inside", per_node, 100.0, 0.0), Link("network", per_node * nodes, 10.0, 0.0))
    return ClusterSpec("test", Device("d", "cuda", 0), per_node, nodes, links=links)


@pytest.mark.parametrize(
    ("layout", "name", "crossed"),
    [
        (Layout(dp_shard=2, tp=8, zero=1), "tp", "inside"),
        (Layout(dp_shard=2, tp=8, zero=1), "dp_shard", "network"),
        (Layout(tp=16), "tp", "network"),
        (Layout(dp_shard=4, tp=4, zero=1, ep=4), "ep", "inside"),
        (Layout(dp_shard=4, tp=4, zero=1, ep=8), "ep", "inside"),
        (Layout(dp_shard=4, tp=4, zero=1, ep=8, expert_tp=2), "ep", "network"),
        (Layout(dp_replicate=16), "cp", None),
    ],
)
def test_links_that_groups_cross(layout, name, crossed):
    cluster = _cluster(2)
    crossing = axis(layout, name)
    link = slowest_link(cluster, crossing)
    assert (link and link.name) == crossed
    assert spans_nodes(cluster, crossing) == (crossed == "network")
    apart = any(len({rank // 8 for rank in group}) > 1 for group in groups(layout, name))
    assert spans_nodes(cluster, crossing) == apart


def test_a_group_may_straddle_nodes_that_its_degree_would_fit():
    cluster, layout = _cluster(3, per_node=4), Layout(dp_shard=2, tp=6, zero=1)
    assert spans_nodes(cluster, axis(layout, "tp"))
