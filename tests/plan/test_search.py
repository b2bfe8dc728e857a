"""The search finds what trying every layout one by one finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small import HOST, every_layout, job, model

from kumi.plan.estimate import estimate, estimate_many
from kumi.plan.layout_batch import CHOICES
from kumi.plan.memory import device_memory
from kumi.plan.search import search_layouts as searching
from kumi.plan.search.candidates import bases
from kumi.plan.search.fitting import bases_of, fit, offloads, variants
from kumi.plan.search.search_layouts import HAIR, effort, search, smallest
from kumi.spec.checks import problems
from kumi.spec.layout import Layout

# One node with sequences so long that activations decide what fits; 185 layouts.
PINNED = {"cp": 1, "microbatch": 2, "dp_replicate": 1}
SMALL = {"nodes": 1, "sequences": 8, "seq_len": 8192}


@pytest.fixture(scope="module")
def tried():
    """Every layout of the small job that agrees with `PINNED`, with its estimate, made one by one."""
    wanted = job(**SMALL)
    return [estimate(wanted, layout) for layout in every_layout(wanted, **PINNED)]


def with_memory(usable):
    """The small job on devices of which `usable` bytes may be filled."""
    return job(**SMALL, memory=np.ceil(usable / device_memory.USABLE_SHARE))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_the_best_of_all_layouts_that_fit(tried, share):
    """The best time within the model's own tie rule, and the same decisions about what fits but for a few layouts whose
    memory, between one recomputed layer and all, is taken to be a straight line."""
    usable = float(np.quantile([one.peak_memory for one in tried], share))
    wanted = with_memory(usable)
    found = search(wanted, PINNED, top=4)
    fitting = [one for one in tried if one.peak_memory <= device_memory.usable_memory(wanted.cluster.device)]
    looked_at = [one for one in tried if one.layout.schedule != "gpipe"]
    fit = sum(one.layout.schedule != "gpipe" for one in fitting)
    assert found.count == len(looked_at)
    assert 0.97 * fit <= found.fitting <= fit
    least = min(one.step_seconds for one in fitting)
    # Neighbours that the space leaves out, such as unequal stages, may be faster still.
    assert min(one.step_seconds for one in found.plans) <= least * (1 + 1e-9)
    assert found.plans[0].step_seconds <= least * (1 + HAIR)
    assert all(one.fits for one in found.plans)


def test_gpipe_is_never_better_than_1f1b(tried):
    """Why the search looks at it only where it is pinned."""
    known = {one.layout: one for one in tried}
    pairs = [(one, known[replace(one.layout, schedule="1f1b")]) for one in tried if one.layout.schedule == "gpipe"]
    assert len(pairs) > 5
    assert all(other.step_seconds <= one.step_seconds * (1 + 1e-9) for one, other in pairs)
    assert all(other.peak_memory <= one.peak_memory for one, other in pairs)


def test_the_simplest_of_equally_fast_layouts_comes_first(tried):
    found = search(with_memory(1 << 34), PINNED, top=1)
    least = min(one.step_seconds for one in tried)
    near = [one for one in tried if one.step_seconds <= (1 + HAIR) * least]
    assert len(near) > 1
    assert effort(found.plans[0].layout) == min(effort(one.layout) for one in near)
    found = search(with_memory(1 << 34), PINNED, top=8)
    rest = [one.step_seconds for one in found.plans[1:]]
    assert rest == sorted(rest)


def test_what_few_can_run_takes_more_effort():
    plain = Layout(pp=4, recompute="full", zero=1, dp_shard=2)
    assert effort(plain) < effort(replace(plain, recompute="none", offload="activations"))
    assert effort(replace(plain, stages=2, schedule="interleaved")) < effort(replace(plain, schedule="zb-h1"))


def test_the_leanest_layout_is_the_leanest_of_all(tried):
    least = min(one.peak_memory for one in tried)
    found = smallest(job(**SMALL), PINNED)
    assert found is not None
    assert found.peak_memory == pytest.approx(least, rel=1e-6)
    assert not search(with_memory(0.99 * least), PINNED).plans
    assert search(with_memory(1.001 * least), PINNED).plans


def test_the_front_of_time_and_memory_is_beaten_by_nothing(tried):
    """Of all that recomputes nothing, as everything fits here: what recomputes is looked at where the rest does not
    fit."""
    front = search(with_memory(1 << 34), PINNED).pareto
    assert len(front) > 2
    for one in front:
        leaner = [
            other for other in tried if other.peak_memory < 0.999 * one.peak_memory and other.layout.recompute == "none"
        ]
        assert all(other.step_seconds > 0.98 * one.step_seconds for other in leaner)


@pytest.mark.parametrize("of", [model(3), model(4, experts=4)], ids=["dense", "experts"])
def test_the_space_is_all_that_is_legal(of):
    wanted = job(of=of, sequences=8)
    rows = bases(wanted, {})
    found = [rows.row(index) for index in range(len(rows))]
    assert len(set(found)) == len(found)
    assert all(not problems(of, one, wanted.cluster, wanted.batch) for one in found[::7])
    dense = {one for one in found if one.ep == one.expert_tp == 1}
    plain = {one for one in every_layout(wanted) if one.recompute == "none" and one.schedule != "gpipe"}
    assert dense == plain
    assert (
        any(one.ep > 1 for one in found) == any(one.expert_tp > 1 for one in found) == ("experts" in str(of.layers[0]))
    )


@pytest.mark.parametrize(
    "pinned",
    [
        {"tp": 2},
        {"pp": 2, "schedule": "gpipe"},
        {"pp": 4, "stages": 1, "recompute": "full", "recompute_layers": 1},
        {"dp_shard": 2, "zero": 3, "microbatch": 1},
        {"tp": 4, "sequence_parallel": False},
        {"recompute": "selective", "recompute_layers": None},
        {"recompute_layers": 2},
        {"cp": 8, "zero": 3},
        {"offload": "optimizer"},
        {"dp_replicate": 8, "zero": 0, "recompute": "none", "offload": "none"},
    ],
)
def test_what_is_pinned_holds_in_every_plan(pinned):
    wanted = job(of=model(8), sequences=8, host=HOST)
    found = search(wanted, pinned, top=6)
    assert found.plans
    for one in (*found.plans, *found.pareto):
        assert {name: getattr(one.layout, name) for name in pinned} == pinned
        assert not problems(wanted.model, one.layout, wanted.cluster, wanted.batch)
        assert one == estimate(wanted, one.layout)
    assert 0 < found.count < 46_380


def test_nothing_is_found_where_pins_contradict_each_other():
    found = search(job(), {"tp": 4, "dp_shard": 4})
    assert (found.plans, found.count, found.smallest) == ((), 0, None)
    assert smallest(job(), {"tp": 3}) is None


@pytest.mark.parametrize("chunk", [50, 1 << 16])
def test_the_answer_does_not_depend_on_how_the_work_is_cut(chunk, monkeypatch):
    expected = search(job(host=HOST), {"microbatch": 1}, top=5)
    monkeypatch.setattr(searching, "CHUNK", chunk)
    assert search(job(host=HOST), {"microbatch": 1}, top=5) == expected


@pytest.mark.parametrize("offload", ["none", "optimizer", "states", "activations"])
@pytest.mark.parametrize(
    "of", [model(8), model(8, experts=4, dense=3), model(6, vocab=60000)], ids=["dense", "mixed", "head"]
)
def test_memory_between_few_and_all_layers_recomputed_is_never_too_low(of, offload):
    """Straight lines between one layer and all; what the search takes to fit does fit.

    What leaves for the host leaves another moment of the step the fullest, which moves a few bytes.
    """
    near = 1 + (0.01 if offload == "states" else 1e-9)
    wanted = job(1, of=of, sequences=8, seq_len=8192, host=HOST, kind="bf16")
    rows = bases_of(wanted, bases(wanted, {"cp": 1, "microbatch": 2}))
    for one in variants(rows, {"offload": offload}):
        if not one.recompute:
            continue
        for capacity in np.quantile(one.first.max(axis=0), [0.0, 0.3, 0.7]):
            found = fit(rows, one, capacity)
            index = np.flatnonzero(found.fits & one.held)
            layouts = [
                replace(
                    rows.x.row(int(row)),
                    recompute=CHOICES["recompute"][one.recompute],
                    offload=offload,
                    recompute_layers=int(found.layers[row]),
                )
                for row in index
            ]
            if layouts:
                exact = estimate_many(wanted, layouts).memory
                assert (exact <= found.peak[index] * near).all()
                assert (exact <= capacity * near).all()


def test_states_leave_for_the_host_where_nothing_else_helps():
    """Each device's share of the host holds what leaves; a small host holds nothing."""
    assert offloads(job()) == ["none"]
    assert offloads(job(host=HOST))[:2] == ["none", "optimizer"]
    assert not any(name.endswith("nvme") for name in offloads(job(host=replace(HOST, nvme=0))))
    big = model(4, hidden=2048)
    least = smallest(job(1, of=big), {"dp_replicate": 4})
    assert least is not None
    tight = job(1, of=big, memory=0.9 * least.peak_memory, host=HOST)
    found = search(tight, {"dp_replicate": 4})
    assert found.plans
    assert all(one.layout.offload != "none" for one in found.plans)
    assert not search(
        replace(tight, cluster=replace(tight.cluster, host=replace(HOST, memory=1 << 20))), {"dp_replicate": 4}
    ).plans


def test_stages_are_unequal_where_the_head_is_large():
    """A head of 120,000 words weighs as much as several of the layers: the last stage gets fewer."""
    wanted = job(of=model(16, vocab=120000), sequences=64)
    pinned = {"pp": 4, "dp_replicate": 2, "schedule": "1f1b", "microbatch": 1}
    best = search(wanted, pinned).plans[0]
    layers = best.layout.stage_layers
    assert sum(layers) == 16
    assert layers[3] < min(layers[:3])
    even = estimate(wanted, replace(best.layout, stage_layers=()))
    assert best.step_seconds < 0.95 * even.step_seconds
    # With a small one they are even.
    small = search(job(of=model(16, vocab=100), sequences=64), pinned).plans[0].layout
    assert small.stage_layers == () or max(small.stage_layers) - min(small.stage_layers) <= 1


def test_progress_ends_at_one():
    told = []
    search(job(), {}, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_experts_are_divided_where_they_fill_the_devices():
    """Routed experts are cut by ep; tensor parallelism would cut them as well."""
    of, pinned = model(8, experts=64, hidden=2048), {"zero": 1, "pp": 1, "tp": 1, "offload": "none"}
    whole, least = (smallest(job(of=of), pinned | pin) for pin in ({"ep": 1}, {}))
    assert least.peak_memory < 0.9 * whole.peak_memory
    found = search(job(of=of, memory=(whole.peak_memory + least.peak_memory) / 2 / device_memory.USABLE_SHARE), pinned)
    assert found.plans
    assert all(one.layout.ep > 1 for one in found.plans)
