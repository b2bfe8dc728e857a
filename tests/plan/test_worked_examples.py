"""Figures of guides, reproduced under their own assumptions, and the planner's estimates of the same.

These are the examples of docs/worked-examples.md that follow from formulas; tests/plan/test_measured_examples.py has
those that were measured.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_jobs import planned

from kumi.plan.engines import ENGINES
from kumi.plan.estimate import estimate, estimated_timeline
from kumi.plan.pipeline.timeline import simulate
from kumi.plan.time.traffic import collectives
from kumi.spec.batch import BatchSpec
from kumi.spec.divisibility import divisors
from kumi.spec.engine import KUMI
from kumi.spec.layout import AXES, Layout
from kumi.spec.ledger import num_params
from kumi.spec.schedule import actions, stage_assignment

# The guides' 70 B, in bf16 without master weights, sharded by each ZeRO stage as in DeepSpeed.
PURE = replace(KUMI, half_weights=True)
LLAMA_70B = planned("llama-3-70b", "aws-p5", 1, 4096, 8, engine=PURE, kind="bf16-pure")
SIZE = num_params(LLAMA_70B.model) / 70e9
EIGHT = {0: Layout(dp_replicate=8), **{zero: Layout(dp_shard=8, zero=zero) for zero in (1, 2, 3)}}


def states(estimated):
    """Bytes of parameters, gradients and optimizer on the fullest rank."""
    return max(one.params + one.grads + one.optimizer for one in estimated.memory)


# States


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 560), (1, 315), (2, 192.5), (3, 70)])
def test_states_of_a_70b_on_8_devices_at_8_bytes_a_parameter(zero, gigabytes):
    assert states(estimate(LLAMA_70B, EIGHT[zero])) == pytest.approx(gigabytes * 1e9 * SIZE, rel=1e-3)


@pytest.mark.parametrize(
    ("engine", "each"),
    [
        (replace(KUMI, half_weights=True, grad_itemsize=2), 16),  # 2 + 2 + 12, as the ZeRO paper counts
        (KUMI, 16),  # float32 weights, gradients and moments
        (ENGINES["megatron-lm"], 18),  # gradients are added up in float32
        (ENGINES["nanotron"], 20),  # and the bfloat16 gradients exist at the same time
    ],
)
def test_mixed_precision_takes_16_bytes_a_parameter_or_more(engine, each):
    job = planned("llama-3-70b", "aws-p5", 1, 4096, 8, engine=engine)
    size = states(estimate(job, EIGHT[0])) / num_params(job.model)
    assert size == pytest.approx(each, rel=1e-3)


def test_fsdp_needs_more_in_passing_than_its_share_of_the_states():
    """(parameters + gradients + optimizer) / N leaves out layers that are temporarily unsharded."""
    memory = estimate(planned("llama-3-70b", "aws-p5", 8, 4096, 64), Layout(dp_shard=64, zero=3)).memory[0]
    share = 16 * num_params(LLAMA_70B.model) / 64
    assert memory.params + memory.grads + memory.optimizer == pytest.approx(share, rel=0.01)
    assert memory.gathered > 0.3 * share


# Activations


def activation_bytes(engine, recompute):
    """Bytes of activations per token, hidden element and layer, of a 70 B at batch 1 x 2048."""
    job = planned("llama-3-70b", "aws-p5", 1, 2048, 8, engine=ENGINES[engine])
    activations = estimate(job, Layout(dp_replicate=8, recompute=recompute)).memory[0].activations
    return activations / (2048 * 8192 * 80)


def test_activations_take_two_to_four_times_what_the_rule_says():
    """16 x batch x sequence x hidden x layers is 21 GB of a 70 B at batch 1 x 2048; the guide's own "about 1 GB a
    layer, 80 GB" is 64 times. The planned bytes lie between."""
    each = 2048 * 8192 * 80
    assert (16 * each, 64 * each) == (pytest.approx(21.5e9, rel=1e-2), pytest.approx(86e9, rel=1e-2))
    for engine in ("kumi", "megatron-lm", "nanotron"):
        assert 2 * 16 < activation_bytes(engine, "none") < 64
    assert activation_bytes("nanotron", "none") > 1.3 * activation_bytes("megatron-lm", "none")


def test_checkpointing_saves_more_than_the_root_of_the_layers_and_costs_a_third():
    """sqrt(80) is 9: full recomputation keeps the layers' inputs, 2 bytes each, and one layer at a time."""
    assert activation_bytes("kumi", "none") / activation_bytes("kumi", "full") > 12
    job = planned("llama-3-70b", "aws-p5", 8, 4096, 64)
    time = dict(estimate(job, Layout(dp_shard=64, zero=3, recompute="full")).time)
    assert time["recompute"] / (time["forward"] + time["backward"]) == pytest.approx(1 / 3, abs=0.03)


# Traffic


def sent(job, layout, axis, kinds, *, passes=1.0):
    """Bytes that a rank sends a step along `axis` in messages of `kinds`, as a ring sends them."""
    messages = [one for one in collectives(job, layout) if one.axis == axis and one.kind in kinds]
    return sum(passes * (one.degree - 1) / one.degree * one.bytes * one.count for one in messages)


def test_fsdp_traffic_of_a_70b_on_8_devices():
    """The guide's 122.5 + 122.5 GB are one gathering and one reduction of bf16 a step; there are two gatherings in
    every microbatch, and gradients usually travel in float32."""
    half = replace(LLAMA_70B, engine=replace(PURE, grad_reduce_itemsize=2))
    gathered = sent(half, EIGHT[3], "dp_shard", ("all_gather",))
    reduced = sent(half, EIGHT[3], "dp_shard", ("reduce_scatter",))
    assert reduced == pytest.approx(122.5e9 * SIZE, rel=1e-3)
    assert 2 * reduced == pytest.approx(245e9 * SIZE, rel=1e-3)
    assert 2 * reduced * 8 / SIZE == pytest.approx(1960e9, rel=1e-3)  # bits, a step a second
    # The embedding, the head and the last layer are gathered once.
    assert 1.93 * reduced < gathered < 2 * reduced
    four = replace(half, batch=BatchSpec(4096, 4 * 8 * 4096))
    assert sent(four, EIGHT[3], "dp_shard", ("all_gather", "reduce_scatter")) == pytest.approx(4 * (gathered + reduced))
    assert sent(LLAMA_70B, EIGHT[3], "dp_shard", ("reduce_scatter",)) == pytest.approx(2 * reduced)


def test_tensor_parallel_traffic_of_a_70b():
    """536 MB a layer and 42.9 GB over 80 layers are one all-reduce a layer at batch 8 x 4096; there are four."""
    layout = Layout(tp=8, microbatch=8, sequence_parallel=False)
    layers = [one for one in collectives(LLAMA_70B, layout) if one.axis == "tp" and one.what == "activations"]
    assert {one.bytes for one in layers} == {2 * 8 * 4096 * 8192}
    assert layers[0].bytes == pytest.approx(536.9e6, rel=1e-3)
    assert sum(one.bytes * one.count for one in layers) == pytest.approx(4 * 42.9e9, rel=2e-3)
    # A ring sends each nearly twice; with sequence parallelism, gathers and scatters send a quarter more.
    plain = sent(LLAMA_70B, layout, "tp", ("all_reduce",), passes=2)
    divided = sent(LLAMA_70B, replace(layout, sequence_parallel=True), "tp", ("all_gather", "reduce_scatter"))
    assert plain == pytest.approx(4 * 42.9e9 * 2 * 7 / 8, rel=0.01)
    assert divided == pytest.approx(1.25 * plain, rel=0.01)


def test_pipeline_traffic_of_a_70b():
    job = planned("llama-3-70b", "aws-p5", 1, 4096, 8)
    layout = Layout(pp=8)
    messages = {one.when: one for one in collectives(job, layout, 3) if one.axis == "pp"}
    assert messages["forward"].bytes == messages["backward"].bytes == pytest.approx(67.1e6, rel=1e-3)
    assert messages["forward"].bytes * messages["forward"].count == pytest.approx(536e6, rel=2e-3)
    # The guide counts one direction of one boundary; an inner rank sends both ways.
    assert messages["forward"].count == messages["backward"].count == 8


def test_tensor_parallel_size_of_a_70b_on_80_gb_cards():
    """280 GB over 80 - 20 GB is 4.67, so 8; the optimizer's other 280 GB are left out, and with them 8 is too few."""
    fewest = 280 / (80 - 20)
    assert fewest == pytest.approx(4.67, abs=0.01)
    assert min(size for size in divisors(8) if size >= fewest) == 8
    estimated = estimate(LLAMA_70B, Layout(tp=8, recompute="full"))
    assert 0.8 * estimated.usable < states(estimated) < estimated.usable
    mixed = estimate(planned("llama-3-70b", "aws-p5", 1, 4096, 8), Layout(tp=8, recompute="full"))
    assert not mixed.fits


# Pipelines


def idle_share(schedule, stages, pp, microbatches):
    """Share of the ranks' time that equal stages idle, a backward taking twice a forward."""
    assignment = stage_assignment(schedule, pp, stages)
    made = simulate(actions(schedule, pp, stages, microbatches), assignment, [(1.0, 1.0, 1.0)] * (pp * stages))
    return sum(made.idle) / made.seconds / pp


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_4_stages_and_8_microbatches_is_27_percent(schedule):
    assert idle_share(schedule, 1, 4, 8) == pytest.approx(0.2727, abs=1e-4)
    # M >= 4 P keeps it below a fifth.
    for pp in (2, 4, 8, 16):
        assert idle_share(schedule, 1, pp, 4 * pp) == pytest.approx((pp - 1) / (5 * pp - 1))
        assert idle_share(schedule, 1, pp, 4 * pp) < 0.2


def test_the_bubble_of_a_real_model_is_not_the_rule_s():
    """The head of Llama-3-8B weighs as much as more than two of its layers: the others wait for the stage that has it,
    in every microbatch."""
    job = planned("llama-3-8b", "aws-p5", 1, 8192, 64, engine=ENGINES["megatron-lm"])
    timeline = estimated_timeline(job, estimate(job, Layout(pp=8, recompute="full")))
    rule = 7 / (64 + 7)
    assert sum(timeline.idle) / timeline.seconds / 8 > 2 * rule


def test_schedules_trade_bubble_memory_and_traffic():
    """GPipe and 1F1B idle alike, 1F1B keeps less; interleaving idles least and sends more."""
    job = planned("llama-3-70b", "aws-p5", 4, 4096, 32)
    gpipe, plain, interleaved = (
        estimate(job, Layout(pp=4, tp=8, schedule=schedule, stages=stages))
        for schedule, stages in (("gpipe", 1), ("1f1b", 1), ("interleaved", 4))
    )
    bubble = [dict(one.time)["bubble"] for one in (gpipe, plain, interleaved)]
    assert bubble[0] == pytest.approx(bubble[1], rel=0.02)
    assert bubble[2] < 0.5 * bubble[1]
    assert plain.memory[0].activations < interleaved.memory[0].activations < gpipe.memory[0].activations
    sends = [
        sum(one.bytes * one.count for one in found.collectives if one.axis == "pp") for found in (plain, interleaved)
    ]
    assert sends[1] > 3 * sends[0]


def test_batches_of_the_gpipe_example():
    assert BatchSpec(512, 512 * 32).microbatches(Layout(microbatch=4)) == 8
    assert BatchSpec(512, 512 * 4 * 8 * 32).microbatches(Layout(dp_replicate=32, microbatch=4)) == 8
    assert 4 * 8 * 32 == 1024


# Which sharding, and where


def test_more_sharding_takes_less_memory_and_more_traffic():
    job = planned("llama-3-8b", "aws-p5", 2, 8192, 64)
    layouts = [Layout(dp_replicate=16), Layout(dp_shard=16, zero=2), Layout(dp_shard=16, zero=3)]
    made = [estimate(job, layout) for layout in layouts]
    peaks = [one.peak_memory for one in made]
    assert peaks == sorted(peaks, reverse=True)
    full, middle = (
        sum(one.bytes * one.count for one in found.collectives if one.axis == "dp_shard")
        for found in (made[2], made[1])
    )
    assert full > 1.2 * middle
    hybrid = estimate(job, Layout(dp_replicate=2, dp_shard=8, zero=3))
    assert {one.axis: one.link for one in hybrid.collectives if one.axis == "dp_shard"}["dp_shard"].startswith("NVLink")


def test_tensor_parallel_ranks_are_neighbours_and_pipeline_ranks_are_far_apart():
    layout = Layout(pp=4, dp_shard=2, tp=8, zero=1)
    assert [axis for axis in reversed(AXES) if getattr(layout, axis) > 1] == ["tp", "dp_shard", "pp"]
    estimated = estimate(planned("llama-3-70b", "aws-p5", 8, 4096, 64), layout)
    links = {one.axis: one.link for one in estimated.collectives}
    assert links["tp"].startswith("NVLink")
    assert links["pp"].startswith("EFA")
    assert links["dp_shard"].startswith("EFA")


def test_the_rule_by_size_on_one_node():
    """DDP up to 10 B, FSDP up to 70 B: by memory alone 8 B is too large for DDP on 80 GB already, and 70 B for one node
    whatever is divided."""
    small = planned("llama-3-8b", "aws-p5", 1, 8192, 64)
    assert not estimate(small, Layout(dp_replicate=8, recompute="full")).fits
    assert estimate(small, Layout(dp_shard=8, zero=3, recompute="full")).fits
    large = planned("llama-3-70b", "aws-p5", 1, 8192, 64)
    assert not estimate(large, Layout(dp_shard=8, zero=3, recompute="full")).fits
    assert estimate(large, Layout(dp_shard=8, zero=3, recompute="full", offload="states")).fits
