"""Layouts that fit in the search's linear model of memory, but not in full, recompute more layers until they fit."""

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
    """Return Llama-3-8B on one H100, on which the states must be offloaded to the host."""
    overrides = [
        "cluster.nodes=1",
        "cluster.devices_per_node=1",
        "plan.margin=0.02",
        f"model.source={RUN.parents[1] / 'models/llama-3-8b'}",
    ]
    return job(load_plan(str(RUN), overrides))


def test_a_layout_that_does_not_quite_fit_recomputes_a_few_layers_more(alone):
    plans = search(alone, {"offload": "states"}, accept=lambda layout: layout.recompute == "selective").plans
    best = next(plan for plan in plans if plan.layout.recompute_layers is not None)
    assert best.fits
    fewer = replace(best.layout, recompute_layers=(best.layout.recompute_layers or 32) - 1)
    assert not estimate(alone, fewer).fits
    in_all = estimate(alone, replace(best.layout, recompute_layers=None))
    assert best.step_seconds < in_all.step_seconds


@pytest.mark.parametrize("how", ["selective", "full"])
def test_a_pinned_kind_of_recomputation_holds_for_all_layers(alone, how):
    result = search(alone, {"offload": "states", "recompute": how}, top=4)
    assert result.plans
    assert {plan.layout.recompute_layers for plan in (*result.plans, *result.pareto)} == {None}
    assert result.smallest.recompute_layers is None


def test_how_many_layers_recompute_stays_as_pinned(alone):
    plans = search(alone, {"offload": "states", "recompute": "selective", "recompute_layers": 32}).plans
    assert {plan.layout.recompute_layers for plan in plans} <= {None, 32}
