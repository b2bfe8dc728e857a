"""The search agrees with estimating every layout one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small import HOST, MARGIN, every_layout, job, model

from kumi.plan.estimate import estimate, estimate_many
from kumi.plan.layout_batch import CHOICES
from kumi.plan.memory import device_memory
from kumi.plan.search import search_layouts as searching
from kumi.plan.search.candidates import layout_grid
from kumi.plan.search.fitting import fit_variant, make_candidates, possible_offloads, variants
from kumi.plan.search.ranking import TIE_TOLERANCE, complexity, expected_seconds, rank_plans
from kumi.plan.search.search_layouts import estimate_smallest, search
from kumi.plan.standard_layouts import estimate_standard_layouts
from kumi.spec.checks import illegal
from kumi.spec.layout import Layout

# One node with sequences so long that activations decide what fits; 185 layouts.
PINNED = {"cp": 1, "microbatch": 2, "dp_replicate": 1}
SMALL = {"nodes": 1, "sequences": 8, "seq_len": 8192}


@pytest.fixture(scope="module")
def tried():
    """Return the estimates of all layouts of the small job that agree with `PINNED`, made one by one."""
    small = job(**SMALL)
    return [estimate(small, layout) for layout in every_layout(small, **PINNED)]


def with_memory(usable):
    """Return the small job on devices with `usable` bytes that a plan may fill."""
    return job(**SMALL, memory=np.ceil(usable / (1 - MARGIN)))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0])
def test_the_best_of_all_layouts_that_fit(tried, share):
    """The best time agrees within the tie tolerance.

    The layouts that fit agree, too, except for a few: the search takes memory to be linear between one recomputed layer
    and all.
    """
    usable = float(np.quantile([item.peak_memory for item in tried], share))
    limited = with_memory(usable)
    result = search(limited, PINNED, top=4)
    fitting = [item for item in tried if item.peak_memory <= device_memory.usable_memory(limited)]
    searched = [item for item in tried if item.layout.schedule != "gpipe"]
    fit = sum(item.layout.schedule != "gpipe" for item in fitting)
    assert result.count == len(searched)
    assert 0.97 * fit <= result.fitting <= fit
    least = min(item.step_seconds for item in fitting)
    # Neighbours outside the search, such as unequal stages, may be even faster.
    assert min(item.step_seconds for item in result.plans) <= least * (1 + 1e-9)
    expected = min(expected_seconds(limited, item) for item in fitting)
    assert expected_seconds(limited, result.plans[0]) <= expected * (1 + TIE_TOLERANCE)
    assert all(item.fits for item in result.plans)


def test_gpipe_is_never_better_than_1f1b(tried):
    """So the search includes it only if it is pinned."""
    estimates = {item.layout: item for item in tried}
    pairs = [
        (item, estimates[replace(item.layout, schedule="1f1b")]) for item in tried if item.layout.schedule == "gpipe"
    ]
    assert len(pairs) > 5
    assert all(other.step_seconds <= gpipe.step_seconds * (1 + 1e-9) for gpipe, other in pairs)
    assert all(other.peak_memory <= gpipe.peak_memory for gpipe, other in pairs)


def test_the_simplest_of_equally_fast_layouts_comes_first(tried):
    result = search(with_memory(1 << 34), PINNED, top=1)
    least = min(item.step_seconds for item in tried)
    near = [item for item in tried if item.step_seconds <= (1 + TIE_TOLERANCE) * least]
    assert len(near) > 1, "all of them certainly fit"
    assert complexity(result.plans[0].layout) == min(complexity(item.layout) for item in near)
    result = search(with_memory(1 << 34), PINNED, top=8)
    rest = [item.step_seconds for item in result.plans[1:]]
    assert rest == sorted(rest)


def test_a_gain_that_the_error_explains_does_not_buy_offloading():
    task, plain = job(host=HOST), estimate(job(host=HOST), Layout(dp_shard=8, zero=3))
    for gain, wins in ((0.1, False), (0.3, True)):
        moved = replace(plain, layout=replace(plain.layout, offload="activations"))
        moved = replace(moved, step_seconds=plain.step_seconds * (1 - gain))
        assert (rank_plans(task, [moved, plain], 2)[0] is moved) == wins


def test_a_plan_that_may_run_out_of_memory_must_be_much_faster():
    task = job()
    safe = estimate(task, Layout(dp_shard=8, zero=3))
    full = replace(safe.memory[0], activations=int(0.97 * task.cluster.device.memory) - safe.peak_memory)
    for seconds, wins in ((0.95, False), (0.5, True)):
        risky = replace(safe, memory=(full,), step_seconds=seconds * safe.step_seconds)
        risky = replace(risky, layout=Layout(dp_shard=8, zero=2))
        assert (rank_plans(task, [risky, safe], 2)[0] is risky) == wins


@pytest.mark.parametrize(("layers", "gigabytes"), [(8, 1.0), (16, 1.6), (16, 2.0)])
def test_standard_layouts_are_no_better_than_the_recommended_plan(layers, gigabytes):
    """One that recomputes all layers, and leaves memory free, is better than a plan that fills the device."""
    task = job(of=model(layers, hidden=1024), sequences=32, host=HOST, memory=gigabytes * 1e9)
    best = search(task, {"pp": 1, "cp": 1}, top=1, front=False).plans[0]
    standard = [item.estimate for item in estimate_standard_layouts(task) if item.estimate and item.estimate.fits]
    assert expected_seconds(task, best) <= (1 + TIE_TOLERANCE) * min(expected_seconds(task, item) for item in standard)


def test_a_smaller_version_of_a_plan_may_be_recommended_but_is_no_runner_up():
    task, fast = job(), estimate(job(), Layout(dp_shard=8, zero=2))
    full = replace(fast.memory[0], activations=int(0.97 * task.cluster.device.memory) - fast.peak_memory)
    risky, slow = replace(fast, memory=(full,)), replace(fast, step_seconds=1.02 * fast.step_seconds)
    assert rank_plans(task, [risky], 2, [slow])[0] is slow
    assert rank_plans(task, [fast], 2, [slow]) == (fast,)


def test_runners_up_are_of_different_kinds():
    task = job(of=model(8))
    names = [{"pp": 2, "dp_shard": 4}, {"pp": 4, "dp_shard": 2}, {"tp": 2, "dp_shard": 4}, {"dp_shard": 8, "zero": 3}]
    plans = [estimate(task, Layout(**name)) for name in names]
    best, *others = rank_plans(task, plans, 3)
    assert len({(plan.layout.pp > 1, plan.layout.tp > 1, plan.layout.zero) for plan in (best, *others)}) == 3
    assert len(rank_plans(task, plans, 4)) == 4


def test_rare_techniques_are_more_complex():
    plain = Layout(pp=4, recompute="full", zero=1, dp_shard=2)
    assert complexity(plain) < complexity(replace(plain, recompute="none", offload="activations"))
    assert complexity(replace(plain, stages=2, schedule="interleaved")) < complexity(replace(plain, schedule="zb-h1"))


def test_the_smallest_estimate_is_the_smallest_of_all(tried):
    least = min(item.peak_memory for item in tried)
    result = estimate_smallest(job(**SMALL), PINNED)
    assert result is not None
    assert result.peak_memory == pytest.approx(least, rel=1e-6)
    assert not search(with_memory(0.99 * least), PINNED).plans
    assert search(with_memory(1.001 * least), PINNED).plans


def test_no_layout_beats_the_front_of_time_and_memory(tried):
    """Compared without recomputation: all layouts fit here, and the search recomputes only in those that do not."""
    front = search(with_memory(1 << 34), PINNED).pareto
    assert len(front) > 2
    for plan in front:
        smaller = [
            item for item in tried if item.peak_memory < 0.999 * plan.peak_memory and item.layout.recompute == "none"
        ]
        assert all(item.step_seconds > 0.98 * plan.step_seconds for item in smaller)


@pytest.mark.parametrize("of", [model(3), model(4, experts=4)], ids=["dense", "experts"])
def test_the_grid_has_all_legal_layouts(of):
    task = job(of=of, sequences=8)
    rows = layout_grid(task, {})
    result = [rows.row(index) for index in range(len(rows))]
    assert len(set(result)) == len(result)
    assert all(not illegal(of, item, task.cluster, task.batch) for item in result[::7])
    dense = {item for item in result if item.ep == item.expert_tp == 1}
    plain = {item for item in every_layout(task) if item.recompute == "none" and item.schedule != "gpipe"}
    assert dense == plain
    assert (
        any(item.ep > 1 for item in result)
        == any(item.expert_tp > 1 for item in result)
        == ("experts" in str(of.layers[0]))
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
def test_every_plan_has_the_pinned_fields(pinned):
    task = job(of=model(8), sequences=8, host=HOST)
    result = search(task, pinned, top=6)
    assert result.plans
    for item in (*result.plans, *result.pareto):
        assert {name: getattr(item.layout, name) for name in pinned} == pinned
        assert not illegal(task.model, item.layout, task.cluster, task.batch)
        assert item == estimate(task, item.layout)
    assert 0 < result.count < 46_380


def test_contradicting_pins_have_no_plan():
    result = search(job(), {"tp": 4, "dp_shard": 4})
    assert (result.plans, result.count, result.smallest) == ((), 0, None)
    assert estimate_smallest(job(), {"tp": 3}) is None


@pytest.mark.parametrize("chunk", [50, 1 << 16])
def test_the_result_does_not_depend_on_the_size_of_chunks(chunk, monkeypatch):
    expected = search(job(host=HOST), {"microbatch": 1}, top=5)
    monkeypatch.setattr(searching, "CHUNK_ROWS", chunk)
    assert search(job(host=HOST), {"microbatch": 1}, top=5) == expected


@pytest.mark.parametrize("offload", ["none", "optimizer", "states", "activations"])
@pytest.mark.parametrize(
    "of", [model(8), model(8, experts=4, dense=3), model(6, vocab=60000)], ids=["dense", "mixed", "head"]
)
def test_memory_between_few_and_all_layers_recomputed_is_never_too_low(of, offload):
    """Memory is taken to be linear between one layer and all; the layouts that fit in the search do fit.

    Offloaded states move the peak to another moment of the step, which changes it by a few bytes.
    """
    near = 1 + (0.01 if offload == "states" else 1e-9)
    task = job(1, of=of, sequences=8, seq_len=8192, host=HOST, kind="bf16")
    candidates = make_candidates(task, layout_grid(task, {"cp": 1, "microbatch": 2}))
    for variant in variants(candidates, {"offload": offload}):
        if not variant.recompute:
            continue
        for capacity in np.quantile(variant.bytes_one.max(axis=0), [0.0, 0.3, 0.7]):
            fit = fit_variant(candidates, variant, capacity)
            index = np.flatnonzero(fit.fits & variant.fits_host)
            layouts = [
                replace(
                    candidates.layouts.row(int(row)),
                    recompute=CHOICES["recompute"][variant.recompute],
                    offload=offload,
                    recompute_layers=int(fit.layers[row]),
                )
                for row in index
            ]
            if layouts:
                exact = estimate_many(task, layouts).memory
                assert (exact <= fit.peak[index] * near).all()
                assert (exact <= capacity * near).all()


def test_states_are_offloaded_if_nothing_else_fits():
    """Not to a host that is too small for the share of each device."""
    assert possible_offloads(job()) == ["none"]
    assert possible_offloads(job(host=HOST))[:2] == ["none", "optimizer"]
    assert not any(name.endswith("nvme") for name in possible_offloads(job(host=replace(HOST, nvme=0))))
    big = model(4, hidden=2048)
    least = estimate_smallest(job(1, of=big), {"dp_replicate": 4})
    assert least is not None
    tight = job(1, of=big, memory=0.9 * least.peak_memory, host=HOST)
    result = search(tight, {"dp_replicate": 4})
    assert result.plans
    assert all(item.layout.offload != "none" for item in result.plans)
    assert not search(
        replace(tight, cluster=replace(tight.cluster, host=replace(HOST, memory=1 << 20))), {"dp_replicate": 4}
    ).plans


def test_stages_are_unequal_if_the_head_is_large():
    """A head of 120,000 tokens takes as long as several layers: the last stage gets fewer."""
    task = job(of=model(16, vocab=120000), sequences=64)
    pinned = {"pp": 4, "dp_replicate": 2, "schedule": "1f1b", "microbatch": 1}
    best = search(task, pinned).plans[0]
    layers = best.layout.stage_layers
    assert sum(layers) == 16
    assert layers[3] < min(layers[:3])
    even = estimate(task, replace(best.layout, stage_layers=()))
    assert best.step_seconds < 0.95 * even.step_seconds
    # With a small head they are even.
    small = search(job(of=model(16, vocab=100), sequences=64), pinned).plans[0].layout
    assert small.stage_layers == () or max(small.stage_layers) - min(small.stage_layers) <= 1


def test_progress_ends_at_one():
    fractions = []
    search(job(), {}, progress=fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_experts_are_sharded_if_they_fill_the_devices():
    """ep shards routed experts; tensor parallelism, pinned to 1 here, would as well."""
    of, pinned = model(8, experts=64, hidden=2048), {"zero": 1, "pp": 1, "tp": 1, "offload": "none"}
    unsharded, least = (estimate_smallest(job(of=of), pinned | pin) for pin in ({"ep": 1}, {}))
    assert least.peak_memory < 0.9 * unsharded.peak_memory
    result = search(job(of=of, memory=(unsharded.peak_memory + least.peak_memory) / 2 / (1 - MARGIN)), pinned)
    assert result.plans
    assert all(item.layout.ep > 1 for item in result.plans)
