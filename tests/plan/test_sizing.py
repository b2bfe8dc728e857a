"""How many machines a number of tokens needs: as few as do it in time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from small import GPU, LINKS, job, model

from kumi.config.cluster_source import on_nodes
from kumi.config.schema import ClusterSection
from kumi.errors import FitError, LayoutError
from kumi.plan.search.remedies import remedies
from kumi.plan.search.search_layouts import search, smallest
from kumi.plan.search.sizing import DAY, size, sizes
from kumi.spec.cluster import ClusterSpec, Link

PINNED = {"pp": 1, "cp": 1, "microbatch": 1, "recompute": "none"}
PAID = replace(GPU, price=2.0, watts=500.0)


def grow(device, nodes):
    """Nodes of four `device`, the network between them where there are several."""
    return ClusterSpec("test", device, 4, nodes, links=LINKS if nodes > 1 else LINKS[:1])


def wanted_job(sequences=48, device=GPU):
    wanted = job(1, of=model(8, hidden=2048), sequences=sequences, seq_len=2048)
    return replace(wanted, of_nodes=partial(grow, device))


def test_one_size_is_the_best_plan_on_so_many_nodes():
    wanted = wanted_job(device=PAID)
    found = size(wanted, PINNED, 3, 1e9)
    assert found is not None
    best = search(replace(wanted, cluster=grow(PAID, 3)), PINNED, top=1).plans[0]
    assert (found.nodes, found.devices, found.best) == (3, 12, best)
    assert found.days * DAY * best.tokens_per_second == pytest.approx(1e9)
    assert found.device_hours == pytest.approx(found.days * 24 * 12)
    assert found.cost == pytest.approx(2.0 * found.device_hours)
    assert found.energy == pytest.approx(0.5 * found.device_hours)
    free = size(wanted_job(), PINNED, 3, 1e9)
    assert free is not None
    assert (free.cost, free.energy) == (None, None)


def test_no_size_where_no_layout_is_legal_or_none_fits():
    assert size(wanted_job(), PINNED, 5, 1e9) is None
    assert size(wanted_job(device=replace(GPU, memory=1 << 28)), PINNED, 1, 1e9) is None


@pytest.fixture(scope="module")
def by_nodes():
    """Days that each number of nodes takes for a number of tokens, where it can be used."""
    found = {nodes: size(wanted_job(), PINNED, nodes, 1e11) for nodes in range(1, 13)}
    return {nodes: one.days for nodes, one in found.items() if one is not None}


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.15])
def test_the_fewest_nodes_that_are_fast_enough(by_nodes, share):
    """Found by halving, over numbers of nodes that have a layout: 5 and 7, say, divide no batch of 48."""
    days = share * max(by_nodes.values())
    found = sizes(wanted_job(), PINNED, 1e11, days)
    assert [one.nodes for one in found] == sorted({one.nodes for one in found})
    assert found[-1].days <= days
    assert all(one.days > days for one in found[:-1])
    assert found[-1].nodes == min(nodes for nodes, taken in by_nodes.items() if taken <= days)


def test_more_nodes_take_fewer_days(by_nodes):
    doubled = [by_nodes[nodes] for nodes in (1, 2, 4, 8)]
    assert doubled == sorted(doubled, reverse=True)
    assert 5 not in by_nodes


def test_too_few_days_are_refused_with_the_fastest():
    with pytest.raises(LayoutError, match=r"0\.001 days are too few: the fastest is .* days on \d+ devices.*raise it"):
        sizes(wanted_job(sequences=4), PINNED, 1e12, 0.001)


def test_a_model_that_fits_on_no_number_is_refused():
    tiny = replace(GPU, memory=1 << 28)
    with pytest.raises(FitError, match="no number of GPU up to"):
        sizes(wanted_job(4, tiny), PINNED, 1e9, 1.0)


def test_a_cluster_grows_over_the_network_that_its_description_names():
    """Not over the links inside of its one node."""
    section = ClusterSection(source="aws-p5", nodes=1)
    one, four = on_nodes(section, 1), on_nodes(section, 4)
    assert [link.span for link in one.links] == [8]
    assert [link.span for link in four.links] == [8, 32]
    assert four.links[1].bandwidth < four.links[0].bandwidth / 5
    sites = partial(on_nodes, ClusterSection(source="aws-p5", nodes=2, sites=2, site_link="optical-100g"))
    assert [link.span for link in sites(4).links] == [8, 16, 32]
    # A site's link is shared by all of its devices.
    assert sites(8).links[-1].bandwidth == pytest.approx(sites(4).links[-1].bandwidth / 2)


def test_sites_are_given_equally_many_nodes():
    between = Link("between sites", 1 << 20, 1e9, 1e-3)

    def two_sites(nodes):
        assert nodes % 2 == 0
        links = (*LINKS[:1], replace(LINKS[1], span=2 * nodes), between)
        return ClusterSpec("test", GPU, 4, nodes, 2, links)

    wanted = replace(wanted_job(), cluster=two_sites(2), of_nodes=two_sites)
    few = size(wanted, PINNED, 2, 1e11)
    assert few is not None
    found = sizes(wanted, PINNED, 1e11, 0.4 * few.days)
    assert all(one.nodes % 2 == 0 for one in found)


def test_more_nodes_are_advised_only_where_it_is_known_how_to_add_them():
    wanted = wanted_job()
    wanted = replace(wanted, model=model(8, hidden=4096))
    leanest = smallest(wanted, PINNED)
    assert leanest is not None
    tight = partial(grow, replace(GPU, memory=int(leanest.peak_memory)))
    wanted = replace(wanted, cluster=tight(1))
    told, untold = (remedies(replace(wanted, of_nodes=how), PINNED, leanest, {}) for how in (tight, None))
    assert any("cluster.nodes=2 (8 devices)" in one for one in told)
    assert [one for one in told if "cluster.nodes" not in one] == untold
