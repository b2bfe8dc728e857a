"""What sums of parts say fits, and does not quite, is made to fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kumi.config import job, load_plan
from kumi.plan.estimate import estimate
from kumi.plan.search.search_layouts import search

RUN = Path(__file__).parents[2] / "examples" / "plan" / "llama-3-8b.toml"


@pytest.fixture(scope="module")
def alone():
    """Llama-3-8B on one H100, where the states must leave for the host."""
    words = ["cluster.nodes=1", "cluster.devices_per_node=1", f"model.source={RUN.parents[1] / 'models/llama-3-8b'}"]
    return job(load_plan(str(RUN), words))


def test_a_layout_that_does_not_quite_fit_recomputes_a_few_layers_more(alone):
    best, *_ = search(alone, {"offload": "states"}, accept=lambda one: one.recompute == "selective").plans
    assert best.fits
    fewer = replace(best.layout, recompute_layers=(best.layout.recompute_layers or 32) - 1)
    assert not estimate(alone, fewer).fits
    whole = estimate(alone, replace(best.layout, recompute_layers=None))
    assert best.step_seconds < whole.step_seconds


@pytest.mark.parametrize("how", ["selective", "full"])
def test_what_is_pinned_to_be_recomputed_is_so_in_all_layers(alone, how):
    found = search(alone, {"offload": "states", "recompute": how}, top=4)
    assert found.plans
    assert {one.layout.recompute_layers for one in (*found.plans, *found.pareto)} == {None}
    assert found.smallest.recompute_layers is None


def test_how_many_layers_recompute_stays_as_pinned(alone):
    found = search(alone, {"offload": "states", "recompute": "selective", "recompute_layers": 32}).plans
    assert {one.layout.recompute_layers for one in found} <= {None, 32}
