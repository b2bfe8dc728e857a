"""The plan of a job: the best layout with all that explains it, or one sentence with changes that would help."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from small import GPU, HOST, LINKS, MARGIN, job, model

from kumi.errors import FitError, LayoutError
from kumi.plan.estimate import estimate
from kumi.plan.search.diagnose import any_layout_fits
from kumi.plan.search.search_layouts import estimate_smallest, search
from kumi.plan.session import plan
from kumi.spec.cluster import ClusterSpec
from kumi.spec.layout import Layout
from kumi.units import parse_bytes

BIG = model(8, hidden=2048)


def grow(device, nodes):
    return ClusterSpec("test", device, 4, nodes, links=LINKS if nodes > 1 else LINKS[:1])


def test_a_plan_is_the_search_s_with_what_explains_it():
    workload = job(of=BIG)
    report, searched = plan(workload, {}, top=3), search(workload, {}, top=4)
    assert (report.best, *report.others) == searched.plans
    assert len(report.others) == 3
    assert (report.searched, report.fitting, report.front) == (searched.count, searched.fitting, searched.pareto)
    assert report.expected
    assert report.job == workload
    assert all(not one.fits and one.step_seconds < report.best.step_seconds for one in report.lacking)


def test_a_pipeline_s_timeline_comes_with_it():
    report = plan(job(of=BIG), {"pp": 4, "dp_replicate": 2})
    assert report.timeline is not None
    assert len(report.timeline.spans) == 4
    assert plan(job(of=BIG), {"pp": 1}).timeline is None


def test_where_everything_is_pinned_that_layout_is_taken_however_slow():
    """Pinned stages mean that the complete layout is pinned."""
    layout = Layout(pp=4, dp_shard=2, zero=1, recompute="full", stage_layers=(1, 3, 3, 1))
    pinned = {"pp": 4, "dp_shard": 2, "zero": 1, "recompute": "full", "stage_layers": (1, 3, 3, 1)}
    report = plan(job(of=BIG), pinned)
    assert report.best == estimate(job(of=BIG), layout)
    assert (report.others, report.searched, report.fitting) == ((), 1, 1)


def test_a_pinned_layout_that_does_not_fit_is_refused_with_its_bytes():
    pinned = {"pp": 4, "dp_replicate": 2, "stage_layers": (2, 2, 2, 2)}
    with pytest.raises(FitError, match=r"of 1 layouts with layout\.pp=4.*needs .* per device"):
        plan(job(of=BIG, memory=1 << 30), pinned)


@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        ({"tp": 3}, "tp=3"),
        ({"tp": 4, "dp_shard": 4, "zero": 1}, "needs 16 devices"),
        ({"zero": 2, "pp": 2}, "zero=2 with pp=2"),
        ({"pp": 4, "stage_layers": (1, 1, 1, 1), "dp_replicate": 2}, "stage_layers"),
        ({"pp": 2, "schedule": "interleaved", "stages": 1}, "interleaved"),
        ({"microbatch": 7}, "microbatch=7"),
        ({"recompute": "full", "recompute_layers": 99}, "recompute_layers=99"),
        ({"recompute": "none", "recompute_layers": 2}, "recompute_layers=2"),
        ({"offload": "optimizer"}, "offload='optimizer'"),
    ],
)
def test_illegal_pins_are_refused_with_the_reason(pinned, words):
    with pytest.raises(LayoutError) as refused:
        plan(job(of=BIG), pinned)
    assert words in str(refused.value)


def refused_with(job, pinned, **fields):
    with pytest.raises(FitError) as refused:
        plan(job, pinned, **fields)
    return str(refused.value)


def tight(share, of=BIG, seq_len=4096):
    """A job on one node of devices with `share` of the least memory that it needs."""
    least = estimate_smallest(job(1, of=of, seq_len=seq_len), {})
    assert least is not None
    return job(1, of=of, seq_len=seq_len, memory=share * least.peak_memory / (1 - MARGIN))


def test_what_is_advised_where_nothing_fits_makes_something_fit():
    """Every remedy alone is enough; half of it is not."""
    job = tight(0.6)
    message = refused_with(replace(job, cluster_of_nodes=partial(grow, job.cluster.device)), {})
    assert "the model does not fit" in message
    nodes = int(re.search(r"set cluster\.nodes=(\d+)", message)[1])
    more = replace(job, cluster=grow(job.cluster.device, nodes))
    assert any_layout_fits(more, {})
    assert not any_layout_fits(replace(job, cluster=grow(job.cluster.device, nodes // 2)), {})
    card = parse_bytes(re.search(r"use devices of (.*?) or more", message)[1])
    larger = replace(job, cluster=replace(job.cluster, device=replace(job.cluster.device, memory=card)))
    assert plan(larger, {}).best.fits
    assert "describe the host's memory" in message
    assert plan(replace(job, cluster=replace(job.cluster, host=HOST)), {}).best.layout.offload != "none"


@pytest.mark.parametrize("pinned", [{}, {"zero": 1}, {"zero": 3}, {"pp": 2}, {"tp": 2, "cp": 2}, {"dp_replicate": 2}])
def test_whether_anything_fits_is_decided_as_by_a_search(pinned):
    """With the smallest microbatches only, if these need the least memory."""
    least = estimate_smallest(job(of=BIG, seq_len=4096), pinned)
    for share, enough in ((1.001, True), (0.999, False)):
        workload = job(of=BIG, seq_len=4096, memory=share * least.peak_memory / (1 - MARGIN))
        assert any_layout_fits(workload, pinned) == enough


def test_shorter_sequences_are_advised_where_they_are_enough():
    job = tight(0.9, of=model(4, hidden=1024), seq_len=8192)
    message = refused_with(job, {"offload": "none"})
    length = int(re.search(r"shorten batch\.seq_len from 8192 to (\d+)", message)[1])
    assert length < 8192
    assert any_layout_fits(replace(job, batch=replace(job.batch, seq_len=length)), {})
    assert not any_layout_fits(replace(job, batch=replace(job.batch, seq_len=2 * length)), {})


def test_the_pin_that_is_in_the_way_is_named():
    pinned = {"zero": 0, "recompute": "none", "tp": 1, "pp": 1, "cp": 1}
    job = tight(1.02)
    message = refused_with(job, pinned)
    names = re.findall(r"do not pin layout\.(\w+)=", message)
    for name in names:
        assert any_layout_fits(job, {key: value for key, value in pinned.items() if key != name})
    pins = {"recompute": "none", "zero": 3}
    name = re.search(r"do not pin layout\.(\w+)=", refused_with(job, pins))
    assert name is not None
    assert any_layout_fits(job, {key: value for key, value in pins.items() if key != name[1]})


def test_hosts_that_are_too_small_for_what_is_pinned_to_them_are_named():
    workload = job(of=BIG, host=replace(HOST, memory=1 << 20))
    message = refused_with(workload, {"offload": "states"})
    assert "layout.offload=states needs more than the hosts have, 1 MiB of memory per node" in message
    whole = {"offload": "states", "pp": 4, "dp_replicate": 2, "stage_layers": (2, 2, 2, 2)}
    assert "needs more than the hosts have" in refused_with(workload, whole)


def test_only_what_is_supported_is_planned():
    def one_way(_, layout):
        return [] if layout.tp == 2 else [f"tp={layout.tp}: set tp = 2"]

    assert plan(job(of=BIG), {}, unsupported=one_way).best.layout.tp == 2
    with pytest.raises(LayoutError, match=r"supports no layout of this job: tp=4: set tp = 2"):
        plan(job(of=BIG), {"tp": 4}, unsupported=one_way)
    few = plan(job(of=BIG), {}, unsupported=lambda _, layout: ["dp > 2"] * (layout.dp > 2)).best.layout
    assert few.dp <= 2, "what is said of all devices' copies is not said of every layout"
    with pytest.raises(LayoutError, match=r"none of the layouts that fit, for example not the fastest: microbatch"):
        plan(job(of=BIG), {}, unsupported=lambda _, layout: [f"microbatch={layout.microbatch} of {layout.tp}"])


def test_what_this_version_trains_is_planned_where_that_is_asked_for():
    layout = plan(job(of=BIG), {}, trainable=True).best.layout
    assert (layout.pp, layout.tp, layout.cp, layout.ep, layout.offload) == (1, 1, 1, 1, "none")


@pytest.mark.parametrize(
    ("fields", "pinned", "words"),
    [
        ({}, {"offload": "states", "zero": 1}, "offload='states' moves parameters to the host, which needs zero=3"),
        ({"of": model(8, experts=8)}, {"tp": 2, "sequence_parallel": False}, "sequence_parallel=false with tp=2"),
        ({"kind": "fp8"}, {}, "precision.kind='fp8'"),
    ],
)
def test_what_this_version_does_not_train_is_refused_where_that_is_asked_for(fields, pinned, words):
    with pytest.raises(LayoutError) as refused:
        plan(job(**{"of": BIG, **fields}), pinned, trainable=True)
    assert words in str(refused.value)


def test_one_device_and_one_node_are_planned_for():
    for devices, nodes in ((1, 1), (4, 1)):
        cluster = ClusterSpec("test", GPU, devices, nodes, links=LINKS[:1] if devices > 1 else ())
        assert plan(replace(job(of=BIG), cluster=cluster), {}).best.layout.world_size == devices
