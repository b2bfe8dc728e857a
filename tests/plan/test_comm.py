"""Collectives on links: against formulas by hand and against published measurements."""

import numpy as np
import pytest

from kumi.plan.time.collective_times import collective_seconds, link_name, ranks_in_block
from kumi.spec.cluster import ClusterSpec, Device, Link

DEVICE = Device("test", "cuda", 80 * 2**30)
INNER = Link("inner", 8, 400e9, 4e-6, 1.0)
OUTER = Link("outer", 64, 50e9, 10e-6, 1.0)
CLUSTER = ClusterSpec("test", DEVICE, 8, 8, links=(INNER, OUTER))


def seconds(kind, size, degree, stride, cluster=CLUSTER):
    return float(collective_seconds(cluster, kind, np.array(size), np.array(degree), np.array(stride)))


@pytest.mark.parametrize(
    ("stride", "degree", "span", "inside"),
    [(1, 8, 8, 8), (1, 64, 8, 8), (2, 8, 8, 4), (8, 8, 8, 1), (16, 2, 8, 1), (1, 4, 8, 4)],
)
def test_members(stride, degree, span, inside):
    assert ranks_in_block(np.array(float(stride)), np.array(float(degree)), span) == inside


def test_large_collectives_are_bound_by_the_slowest_link_and_all_its_cards():
    size = 1e11
    inside = size * 7 / 8 / 400e9
    assert seconds("all_gather", size, 8, 1) == pytest.approx(inside, rel=3e-3)
    assert seconds("all_reduce", size, 8, 1) == pytest.approx(2 * inside, rel=3e-3)
    # Eight ranks of each node bring eight cards; one rank a node brings one.
    assert seconds("all_gather", size, 64, 1) == pytest.approx(size * 63 / 64 / 400e9, rel=3e-3)
    assert seconds("all_gather", size, 8, 8) == pytest.approx(size * 7 / 8 / 50e9, rel=3e-3)
    assert seconds("all_gather", size, 16, 4) == pytest.approx(size * 15 / 16 / 100e9, rel=3e-3)


def test_latency_grows_with_the_group_for_rings_and_with_its_logarithm_for_trees():
    ring = [seconds("all_gather", 8, 8 * nodes, 1) for nodes in (2, 4, 8)]
    assert ring[1] - ring[0] > 15 * 4e-6
    tree = [seconds("all_reduce", 8, degree, 8) for degree in (2, 4, 8)]
    assert tree[2] - tree[1] == pytest.approx(tree[1] - tree[0], rel=0.01)


def test_a_send_goes_over_the_link_that_reaches_its_neighbour():
    assert seconds("send", 4e9, 2, 1) == pytest.approx(0.01, rel=1e-2)
    assert seconds("send", 4e9, 2, 8) == pytest.approx(0.08, rel=1e-2)


def test_the_outermost_link_connects_ranks_whose_distance_does_not_divide_it():
    # The ends of a pipeline of eight stages with eight ranks each: ranks 0 and 56 of 64.
    assert seconds("all_reduce", 1e11, 2, 56) == pytest.approx(1e11 / 50e9, rel=1e-2)


def test_all_to_all_sends_each_part_over_its_own_link():
    # Of 64 parts 56 leave the node, at 50 GB/s.
    assert seconds("all_to_all", 6.4e9, 64, 1) == pytest.approx(5.6e9 / 50e9, rel=1e-2)
    assert seconds("all_to_all", 6.4e9, 8, 1) == pytest.approx(6.4e9 * 7 / 8 / 400e9, rel=1e-2)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_nothing_to_do_takes_no_time(kind):
    assert seconds(kind, 1e9, 1, 1) == 0
    assert seconds(kind, 0, 8, 1) == 0


def test_more_bytes_more_ranks_and_slower_links_never_take_less():
    sizes, degrees = np.meshgrid(np.logspace(3, 10, 15), 2.0 ** np.arange(1, 7))
    for kind in ("all_gather", "all_reduce", "all_to_all"):
        times = collective_seconds(CLUSTER, kind, sizes, degrees, np.ones_like(sizes))
        assert (np.diff(times, axis=1) >= 0).all()
        assert (np.diff(times[:, -1]) >= 0).all()


def test_link_names():
    assert link_name(CLUSTER, 1, 8) == "inner"
    assert link_name(CLUSTER, 1, 16) == "outer"
    assert link_name(CLUSTER, 8, 2) == "outer"
    assert link_name(CLUSTER, 1, 1) == ""


def test_a_ring_of_sends_waits_for_the_slowest_hop():
    # Sixteen ranks side by side are two nodes: somewhere in the ring a message leaves its node.
    assert seconds("send", 4e9, 16, 1) == pytest.approx(0.08, rel=1e-2)
    assert seconds("send", 4e9, 8, 1) == pytest.approx(0.01, rel=1e-2)
