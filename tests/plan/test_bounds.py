"""The bounds of the search leave out nothing that its result shows."""

from __future__ import annotations

import numpy as np
import pytest
from small import HOST, job, model

from kumi.plan.engines import ENGINES
from kumi.plan.estimate import representative_ranks
from kumi.plan.memory import device_memory
from kumi.plan.search import search_layouts as searching
from kumi.plan.search.candidates import layout_grid
from kumi.plan.search.fitting import make_candidates
from kumi.plan.search.search_layouts import search
from kumi.plan.time.layer_costs import cost_table
from kumi.plan.time.least_time import least_step_seconds
from kumi.plan.time.step_time import step_times
from kumi.spec.layout import OFFLOAD, RECOMPUTE

MODELS = {
    "dense": model(8),
    "mixed": model(8, experts=4, dense=3),
    "tied": model(6, tied=True),
    "head": model(6, vocab=60000),
}
# Bytes of a device: from all layouts to few that fit.
MEMORY = (1 << 34, 2.5e9)


@pytest.fixture
def small_chunks(monkeypatch):
    """Search few layouts at a time in one thread, so that most are searched with the bounds of earlier ones."""
    monkeypatch.setattr(searching, "CHUNK_ROWS", 200)
    monkeypatch.setattr(searching, "usable_cores", lambda: 1)


def recomputed_and_offloaded(of, engine):
    """Return a job and all of its layouts, each with some recomputation and offloading."""
    task = job(of=MODELS[of], sequences=8, host=HOST, engine=ENGINES[engine])
    layouts = layout_grid(task, {})
    draw = np.random.default_rng(0)
    kinds, layers, offload = (draw.integers(0, most, len(layouts)) for most in (len(RECOMPUTE), 4, len(OFFLOAD)))
    return task, layouts.replaced(
        recompute=kinds, recompute_layers=np.where(kinds > 0, layers - 1, -1), offload=offload
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of", MODELS)
def test_no_step_is_faster_than_its_bound(of, engine):
    task, layouts = recomputed_and_offloaded(of, engine)
    ranks, costs = representative_ranks(task.model, layouts), cost_table(task, layouts)
    seconds = step_times(task, layouts, *ranks, costs=costs).seconds
    least = least_step_seconds(task, layouts, *ranks, costs)
    assert (least <= seconds).all()
    # It is the time itself where nothing but microbatches takes time.
    assert (least / seconds).max() > 0.9


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("of", MODELS)
def test_total_memory_is_the_sum_of_its_kinds(of, engine):
    task, layouts = recomputed_and_offloaded(of, engine)
    candidates = make_candidates(task, layouts.take(slice(None, None, 7)))
    for recompute in range(len(RECOMPUTE)):
        for offload in range(len(OFFLOAD)):
            for layers in (-1, 0, 1, 2) if recompute else (-1,):
                ones = np.ones(len(candidates.per_rank), np.int64)
                rows = candidates.per_rank.replaced(
                    recompute=recompute * ones, recompute_layers=layers * ones, offload=offload * ones
                )
                kinds = device_memory.stage_memory(task, rows, candidates.stages, candidates.content)
                total = candidates.device_bytes(recompute, layers, offload).ravel()
                np.testing.assert_allclose(total, sum(kinds.values()), rtol=1e-12)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("of", MODELS)
@pytest.mark.parametrize(
    "pinned", [{}, {"recompute": "full", "zero": 3}, {"offload": "none", "cp": 1, "microbatch": 1}], ids=str
)
@pytest.mark.usefixtures("small_chunks")
def test_bounds_change_no_result(of, memory, pinned):
    task = job(of=MODELS[of], sequences=8, memory=memory, host=HOST)
    bounded, full = (search(task, pinned, top=6, bounds=bounds) for bounds in (True, False))
    assert bounded == full
    assert bounded.timed <= full.timed


@pytest.mark.parametrize("names", [("1f1b",), ("1f1b", "interleaved")])
@pytest.mark.usefixtures("small_chunks")
def test_bounds_change_no_result_of_a_trainer(names):
    """A trainer that accepts few layouts gets the fastest of these, however slow they are."""
    task = job(of=MODELS["dense"], sequences=8, host=HOST, memory=2.5e9)

    def accept(layout):
        return layout.schedule in names and layout.pp > 1 and layout.recompute_layers is None

    bounded, full = (search(task, {}, top=6, accept=accept, bounds=bounds) for bounds in (True, False))
    assert bounded.plans == full.plans
    assert bounded.plans
    assert (bounded.count, bounded.fitting, bounded.pareto) == (full.count, full.fitting, full.pareto)


@pytest.mark.usefixtures("small_chunks")
def test_bounds_leave_out_layouts():
    task = job(of=MODELS["mixed"], sequences=8, host=HOST, memory=3e9)
    bounded, full = (search(task, {}, top=1, bounds=bounds) for bounds in (True, False))
    assert 0 < bounded.timed < 0.8 * full.timed
    assert bounded == full
