"""The estimate of a layout: kinds add up, figures are finite on all clusters, and batches agree with single layouts."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import GPU, HOST, INSTANT, LINKS, every_layout, job, model

from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.errors import ConfigError
from kumi.plan.engines import ENGINES
from kumi.plan.estimate import estimate, estimate_many, estimated_timeline
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.engine import KUMI
from kumi.spec.layout import OFFLOAD, Layout
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import stage_bounds

DENSE, EXPERTS, MIXED = model(8), model(8, experts=8), model(8, experts=8, dense=3)
SHAPES = {
    "copies": Layout(dp_replicate=8, microbatch=2),
    "zero-1": Layout(dp_shard=8, zero=1),
    "fsdp": Layout(dp_shard=8, zero=3, recompute="full"),
    "hybrid": Layout(dp_replicate=2, dp_shard=4, zero=3, recompute="selective", recompute_layers=3),
    "tensor": Layout(tp=4, dp_shard=2, zero=1, sequence_parallel=False),
    "context": Layout(cp=4, dp_shard=2, zero=3),
    "pipeline": Layout(pp=4, dp_shard=2, zero=1, recompute="full", recompute_layers=1),
    "interleaved": Layout(pp=2, stages=4, schedule="interleaved", tp=2, dp_replicate=2),
    "zero-bubble": Layout(pp=4, stages=2, schedule="zb-v", tp=2),
    "uneven": Layout(pp=4, dp_replicate=2, stage_layers=(3, 2, 2, 1)),
    "all": Layout(pp=2, tp=2, dp_shard=2, zero=1, recompute="selective"),
}


@pytest.mark.parametrize("engine", ["kumi", "megatron-lm", "megatron-deepspeed", "torchtitan"])
@pytest.mark.parametrize("name", SHAPES)
def test_seconds_by_kind_add_up(name, engine):
    result = estimate(job(of=DENSE, engine=ENGINES[engine]), SHAPES[name])
    assert sum(seconds for _, seconds in result.time) == pytest.approx(result.step_seconds, rel=1e-12)
    assert all(seconds >= 0 for _, seconds in result.time)
    assert len({kind for kind, _ in result.time}) == len(result.time)
    assert result.tokens_per_second * result.step_seconds == pytest.approx(result.tokens_per_step)
    assert 0 < result.mfu < 1


def machines():
    """Return jobs on clusters that lack some figure, by name."""
    plain = job(of=DENSE)
    bare = replace(GPU, processors=0, memory_bandwidth=0.0)
    return {
        "no host": plain,
        "a host": job(of=DENSE, host=HOST),
        "one node": job(1, of=DENSE),
        "no links": replace(plain, cluster=replace(plain.cluster, links=())),
        "no bandwidths": job(of=DENSE, device=bare),
        "cpu": replace(
            plain, cluster=cluster_spec(ClusterSection(source="auto", devices_per_node=8)), precision=PRECISIONS["fp32"]
        ),
        "one cpu": replace(plain, cluster=cluster_spec(ClusterSection(source="auto")), precision=PRECISIONS["fp32"]),
    }


@pytest.mark.parametrize("name", machines())
def test_no_figure_is_infinite_or_missing(name):
    planned_job = machines()[name]
    layouts = [layout for layout in SHAPES.values() if layout.world_size == planned_job.cluster.devices]
    if planned_job.cluster.devices == 4:
        layouts = [Layout(dp_shard=4, zero=3), Layout(pp=2, tp=2), Layout(cp=4, zero=1)]
    if name == "a host":
        layouts += [Layout(dp_shard=8, zero=3, offload=offload) for offload in OFFLOAD]
    for layout in layouts or [Layout(), Layout(recompute="full", microbatch=4)]:
        result = estimate(planned_job, layout).as_dict()
        assert json.loads(json.dumps(result, allow_nan=False))["step_seconds"] > 0
        assert result["peak_memory"] > 0


@pytest.mark.parametrize("drives", [2e9, 50e9])
def test_states_on_drives_are_read_at_the_pace_of_the_slower_of_drives_and_link(drives):
    host = replace(HOST, nvme_bandwidth=drives)

    def each(offload):
        """Return the offload seconds of one more microbatch, with no compute to overlap with."""
        layout = Layout(dp_replicate=8, offload=offload)
        jobs = (job(of=DENSE, sequences=sequences, device=INSTANT, host=host) for sequences in (8, 16))
        few, many = (
            dict(estimate(replace(each_job, engine=replace(KUMI, nvme_params=True)), layout).time) for each_job in jobs
        )
        return many["offload"] - few["offload"]

    assert each("states-nvme") == pytest.approx(each("states") * max(1, host.device_bandwidth / drives))


def test_a_device_of_unknown_speed_is_refused():
    planned_job = job(of=DENSE, device=Device("some GPU", "cuda", 1 << 34))
    with pytest.raises(ConfigError, match="peak FLOP/s of some GPU in bfloat16 is not known"):
        estimate(planned_job, Layout(dp_replicate=8))


def test_the_same_question_has_the_same_answer():
    for layout in SHAPES.values():
        assert estimate(job(of=DENSE), layout) == estimate(job(of=DENSE), layout)


@pytest.mark.parametrize("of", [DENSE, EXPERTS, MIXED], ids=["dense", "experts", "mixed"])
def test_many_at_once_get_what_each_gets_alone(of):
    """Memory, and step time without a pipeline, agree exactly. Pipelines use the closed form, which is exact for equal
    stages and enough microbatches, and close otherwise (tests/plan/test_closed.py)."""
    planned_job = job(of=of, sequences=64)
    layouts = [layout for layout in SHAPES.values() if not layout.stage_layers]
    layouts += [
        replace(layout, tp=1, dp_shard=4, dp_replicate=1, zero=1, pp=2, stages=1, schedule="gpipe")
        for layout in layouts
        if layout.cp == 1
    ]
    layouts = [layout for layout in layouts if layout.world_size == 8]
    many = estimate_many(planned_job, layouts)
    for row, layout in enumerate(layouts):
        alone = estimate(planned_job, layout)
        assert many.memory[row] == pytest.approx(alone.peak_memory, rel=1e-6)
        assert many.host_memory[row] == pytest.approx(alone.host_memory, rel=1e-6)
        near = 1e-9 if layout.pp == 1 else 0.03
        assert many.seconds[row] == pytest.approx(alone.step_seconds, rel=near), layout
        for kind, seconds in alone.time:
            if kind not in ("bubble", "pp"):
                assert many.kinds[kind][row] == pytest.approx(seconds, rel=1e-9, abs=1e-12)


def test_many_at_once_are_not_far_off_where_stages_are_unequal():
    planned_job = job(of=model(4))
    layouts = [layout for layout in every_layout(planned_job, cp=1, tp=1, recompute="full") if layout.pp > 1]
    seconds = np.array([estimate(planned_job, layout).step_seconds for layout in layouts[::7]])
    ratio = estimate_many(planned_job, layouts[::7]).seconds / seconds
    assert len(ratio) > 20
    assert ratio.min() > 0.9
    assert ratio.max() < 1.12
    assert np.abs(ratio - 1).mean() < 0.03


@pytest.mark.parametrize("name", [name for name, layout in SHAPES.items() if layout.pp > 1])
def test_stages_hold_the_model_once(name):
    layout = SHAPES[name]
    result = estimate(job(of=DENSE), layout)
    assert tuple((stage.first, stage.last) for stage in result.stages) == stage_bounds(layout, 8)
    assert len(result.memory) == layout.pp
    assert {stage.rank for stage in result.stages} == set(range(layout.pp))
    assert all(stage.forward > 0 and stage.backward_input > 0 and stage.backward_weight > 0 for stage in result.stages)


@pytest.mark.parametrize("name", [name for name, layout in SHAPES.items() if layout.pp > 1])
def test_the_timeline_lasts_as_long_as_the_microbatches(name):
    planned_job, layout = job(of=DENSE), SHAPES[name]
    result = estimate(planned_job, layout)
    around = dict(estimate(planned_job, replace(layout, recompute="none", recompute_layers=None)).time)["optimizer"]
    around += sum(entry.seconds for entry in result.collectives if entry.when == "update")
    timeline = estimated_timeline(planned_job, result)
    assert timeline is not None
    assert timeline.seconds <= result.step_seconds - around + 1e-12
    if layout.dp == 1:
        assert timeline.seconds == pytest.approx(result.step_seconds - around, rel=1e-9)
    assert estimated_timeline(planned_job, estimate(planned_job, SHAPES["fsdp"])) is None


def test_even_stages_written_out_change_nothing():
    layout = SHAPES["pipeline"]
    written = replace(layout, stage_layers=tuple(last - first for first, last in stage_bounds(layout, 8)))
    plain, same = estimate(job(of=DENSE), layout), estimate(job(of=DENSE), written)
    assert same.time == plain.time
    assert same.memory == plain.memory


@pytest.mark.parametrize("of", [DENSE, MIXED], ids=["dense", "mixed"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=8, zero=1),
        Layout(pp=2, dp_shard=4, zero=1),
        Layout(pp=2, stages=2, schedule="interleaved", dp_shard=4, zero=1),
    ],
)
def test_every_further_layer_that_recomputes_costs_time_and_saves_memory(of, layout):
    planned_job = job(of=of, seq_len=8192)
    most = of.num_hidden_layers // layout.pp
    steps = [
        estimate(planned_job, replace(layout, recompute="full", recompute_layers=count)) for count in range(most + 1)
    ]
    again = [dict(result.time)["recompute"] for result in steps]
    assert again[0] == 0
    # Each layer is an equal share of the rank's layers, so that the costs rise in equal steps.
    assert np.diff(again) == pytest.approx([again[-1] / most] * most, rel=1e-9)
    assert all(result.step_seconds < other.step_seconds for result, other in itertools.pairwise(steps))
    # The first recomputed layer adds the transient memory of recomputation.
    assert all(result.peak_memory > other.peak_memory for result, other in itertools.pairwise(steps))
    whole = estimate(planned_job, replace(layout, recompute="full"))
    assert whole.time == steps[-1].time


FASTER = {"bandwidth": 1.5, "latency": 0.5}


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(SHAPES)), part=st.sampled_from(["peak", "memory_bandwidth", "launch", *FASTER]))
def test_better_machines_are_never_slower(name, part):
    planned_job, cluster = job(of=DENSE), job(of=DENSE).cluster
    device = cluster.device
    if part in FASTER:
        links = tuple(replace(link, **{part: FASTER[part] * getattr(link, part)}) for link in LINKS)
        better = replace(cluster, links=links)
    else:
        value = {
            "peak": tuple((dtype, 2 * flops) for dtype, flops in device.peak),
            "memory_bandwidth": 2 * device.memory_bandwidth,
            "launch": device.launch / 2,
        }[part]
        better = replace(cluster, device=replace(device, **{part: value}))
    before, after = (estimate(replace(planned_job, cluster=machine), SHAPES[name]) for machine in (cluster, better))
    # The time of a slow host counts as input gradients, which the next rank waits for.
    assert after.step_seconds <= before.step_seconds * (1.005 if name == "zero-bubble" else 1 + 1e-9)
    assert after.peak_memory == before.peak_memory


def test_more_tokens_take_longer_but_less_time_each():
    short, long = (estimate(job(of=DENSE, sequences=count), SHAPES["pipeline"]) for count in (16, 64))
    assert short.step_seconds < long.step_seconds < 4 * short.step_seconds


def test_a_cluster_of_one_device():
    planned_job = job(1, of=DENSE)
    alone = replace(planned_job, cluster=ClusterSpec("test", GPU, 1))
    result = estimate(alone, Layout(microbatch=4))
    assert result.collectives == ()
    assert all(dict(result.time)[kind] == 0 for kind in ("tp", "cp", "ep", "pp", "dp", "bubble"))
