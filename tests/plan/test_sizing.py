"""The smallest cluster that trains a number of tokens in time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from small import GPU, LINKS, job, model

from kumi.config.cluster_source import cluster_with_nodes
from kumi.config.job_sections import ClusterSection
from kumi.errors import FitError, LayoutError
from kumi.plan.search.diagnose import remedies
from kumi.plan.search.search_layouts import estimate_smallest, search
from kumi.plan.search.sizing import DAY_SECONDS, plan_on_nodes, search_cluster_sizes
from kumi.spec.cluster import ClusterSpec, Link

PINNED = {"pp": 1, "cp": 1, "microbatch": 1, "recompute": "none"}
PAID = replace(GPU, price=2.0, watts=500.0)


def grow(device, nodes):
    """Return nodes of four `device`, with a network if there are several."""
    return ClusterSpec("test", device, 4, nodes, links=LINKS if nodes > 1 else LINKS[:1])


def sized_job(sequences=48, device=GPU):
    small = job(1, of=model(8, hidden=2048), sequences=sequences, seq_len=2048)
    return replace(small, cluster_of_nodes=partial(grow, device))


def test_a_size_has_the_best_plan_on_its_nodes():
    task = sized_job(device=PAID)
    result = plan_on_nodes(task, PINNED, 3, 1e9)
    assert result is not None
    best = search(replace(task, cluster=grow(PAID, 3)), PINNED, top=1).plans[0]
    assert (result.nodes, result.devices, result.best) == (3, 12, best)
    assert result.days * DAY_SECONDS * best.tokens_per_second == pytest.approx(1e9)
    assert result.device_hours == pytest.approx(result.days * 24 * 12)
    assert result.cost == pytest.approx(2.0 * result.device_hours)
    assert result.energy == pytest.approx(0.5 * result.device_hours)
    free = plan_on_nodes(sized_job(), PINNED, 3, 1e9)
    assert free is not None
    assert (free.cost, free.energy) == (None, None)


def test_no_size_where_no_layout_is_legal_or_none_fits():
    assert plan_on_nodes(sized_job(), PINNED, 5, 1e9) is None
    assert plan_on_nodes(sized_job(device=replace(GPU, memory=1 << 28)), PINNED, 1, 1e9) is None


@pytest.fixture(scope="module")
def by_nodes():
    """Return number of nodes -> days, for the numbers of nodes with a layout."""
    sizes = {nodes: plan_on_nodes(sized_job(), PINNED, nodes, 1e11) for nodes in range(1, 13)}
    return {nodes: size.days for nodes, size in sizes.items() if size is not None}


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.15])
def test_the_fewest_nodes_that_are_fast_enough(by_nodes, share):
    """The bisection skips numbers of nodes without a layout: 5 and 7, for example, do not divide a batch of 48."""
    days = share * max(by_nodes.values())
    result = search_cluster_sizes(sized_job(), PINNED, 1e11, days)
    assert [size.nodes for size in result] == sorted({size.nodes for size in result})
    assert result[-1].days <= days
    assert all(size.days > days for size in result[:-1])
    assert result[-1].nodes == min(nodes for nodes, taken in by_nodes.items() if taken <= days)


def test_more_nodes_take_fewer_days(by_nodes):
    doubled = [by_nodes[nodes] for nodes in (1, 2, 4, 8)]
    assert doubled == sorted(doubled, reverse=True)
    assert 5 not in by_nodes


def test_too_few_days_are_refused_with_the_fastest():
    with pytest.raises(LayoutError, match=r"days 0\.001 is too short: the fastest is .* days on \d+ devices.*raise it"):
        search_cluster_sizes(sized_job(sequences=4), PINNED, 1e12, 0.001)


def test_a_model_that_fits_on_no_number_of_nodes_is_refused():
    tiny = replace(GPU, memory=1 << 28)
    with pytest.raises(FitError, match="fit on no number of GPU devices up to"):
        search_cluster_sizes(sized_job(4, tiny), PINNED, 1e9, 1.0)


def test_a_cluster_grows_over_the_network_that_its_description_names():
    """Not over the links inside its node."""
    section = ClusterSection(source="aws-p5", nodes=1)
    single, four = cluster_with_nodes(section, 1), cluster_with_nodes(section, 4)
    assert [link.span for link in single.links] == [8]
    assert [link.span for link in four.links] == [8, 32]
    assert four.links[1].bandwidth < four.links[0].bandwidth / 5
    sites = partial(cluster_with_nodes, ClusterSection(source="aws-p5", nodes=2, sites=2, site_link="optical-100g"))
    assert [link.span for link in sites(4).links] == [8, 16, 32]
    # A site's link is shared by all of its devices.
    assert sites(8).links[-1].bandwidth == pytest.approx(sites(4).links[-1].bandwidth / 2)


def test_sites_have_equal_numbers_of_nodes():
    between = Link("between sites", 1 << 20, 1e9, 1e-3)

    def two_sites(nodes):
        assert nodes % 2 == 0
        links = (*LINKS[:1], replace(LINKS[1], span=2 * nodes), between)
        return ClusterSpec("test", GPU, 4, nodes, 2, links)

    task = replace(sized_job(), cluster=two_sites(2), cluster_of_nodes=two_sites)
    few = plan_on_nodes(task, PINNED, 2, 1e11)
    assert few is not None
    result = search_cluster_sizes(task, PINNED, 1e11, 0.4 * few.days)
    assert all(size.nodes % 2 == 0 for size in result)


def test_more_nodes_are_advised_only_if_their_network_is_known():
    task = sized_job()
    task = replace(task, model=model(8, hidden=4096))
    leanest = estimate_smallest(task, PINNED)
    assert leanest is not None
    tight = partial(grow, replace(GPU, memory=int(leanest.peak_memory)))
    task = replace(task, cluster=tight(1))
    with_nodes, without = (remedies(replace(task, cluster_of_nodes=how), PINNED, leanest, {}) for how in (tight, None))
    assert any("cluster.nodes=2 (8 devices)" in change for change in with_nodes)
    assert [change for change in with_nodes if "cluster.nodes" not in change] == without
