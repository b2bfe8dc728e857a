"""The listed collectives of a step take the seconds that count in its step time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from small import INSTANT, LINKS, job, model

from kumi.plan.estimate import estimate
from kumi.plan.time.traffic import PARTIAL_GRADS, collectives, exposed_collectives
from kumi.plan.time.unit_collectives import TIED_GRADS
from kumi.spec.cluster import ClusterSpec, Link
from kumi.spec.engine import KUMI
from kumi.spec.layout import Layout
from kumi.spec.schedule import actions

# Large enough that bandwidth dominates latency.
DENSE = model(8, vocab=32000, hidden=4096)
EXPERTS = model(8, experts=8, vocab=32000, hidden=4096)
MIXED = model(8, experts=8, vocab=32000, dense=2, hidden=4096)
TIED = model(8, vocab=32000, hidden=4096, tied=True)
FAR = (LINKS[0], Link("overseas", 1 << 30, 1e9, 0.1))
# No message overlaps.
IN_TURN = replace(KUMI, overlap_grads=False, overlap_params=False)


def sent(planned_job, layout, axis, rank=0):
    """Return an axis' seconds on pipeline rank `rank`: of all messages, in the step time, and exposed."""
    result = estimate(planned_job, layout)
    listed = exposed_collectives(planned_job, layout, dict(result.time), rank)
    kinds = {"tp": ("tp",), "cp": ("cp",), "ep": ("ep", "expert_tp"), "pp": ("pp",)}.get(axis)
    # These run once a step, are small, and do not count in the step time.
    every = [entry for entry in listed if entry.what != PARTIAL_GRADS]
    own = [entry for entry in every if (entry.axis in kinds if kinds else entry.axis.startswith(("dp", "world")))]
    return sum(entry.seconds for entry in own), dict(result.time)[axis], sum(entry.exposed for entry in own)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4, dp_shard=2, zero=1),
        Layout(tp=4, dp_shard=2, zero=1, sequence_parallel=False),
        Layout(tp=4, dp_shard=2, zero=3, recompute="full"),
        Layout(tp=2, dp_shard=4, zero=1, recompute="full", recompute_layers=3),
        Layout(tp=2, dp_replicate=4, recompute="selective"),
        Layout(tp=8, microbatch=2),
    ],
)
def test_tensor_parallel_messages_take_what_the_step_is_charged(layout):
    seconds, charged, exposed = sent(job(of=DENSE), layout, "tp")
    assert seconds == pytest.approx(charged, rel=1e-9)
    assert exposed == pytest.approx(charged, rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ep=4, dp_shard=8, zero=1),
        Layout(ep=8, dp_shard=4, tp=2, zero=1),
        Layout(ep=4, dp_shard=8, zero=1, recompute="full"),
        Layout(ep=2, dp_shard=4, tp=2, zero=3, expert_tp=2),
    ],
)
def test_tokens_on_their_way_to_experts_take_what_the_step_is_charged(layout):
    seconds, charged, _ = sent(job(of=EXPERTS), layout, "ep")
    assert charged > 0
    assert seconds == pytest.approx(charged, rel=1e-9)


@pytest.mark.parametrize("layout", [Layout(cp=4, dp_shard=2, zero=1), Layout(cp=8, zero=3), Layout(cp=2, tp=4)])
def test_what_attention_does_not_hide_of_the_ring_is_charged(layout):
    nothing_hides = job(of=DENSE, seq_len=8192, device=INSTANT)
    seconds, charged, _ = sent(nothing_hides, layout, "cp")
    assert seconds == pytest.approx(charged, rel=1e-6)
    seconds, charged, exposed = sent(job(of=DENSE, seq_len=8192), layout, "cp")
    assert exposed == pytest.approx(charged)
    assert charged < seconds


@pytest.mark.parametrize("of", [DENSE, EXPERTS, MIXED, TIED], ids=["dense", "experts", "mixed", "tied"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=8),
        Layout(dp_shard=8, zero=1),
        Layout(dp_shard=8, zero=2),
        Layout(dp_replicate=2, dp_shard=4, zero=1),
        Layout(dp_replicate=2, dp_shard=4, zero=2, microbatch=2),
        Layout(cp=4, dp_shard=2, zero=1),
        Layout(cp=4, dp_replicate=2),
        Layout(dp_shard=2, tp=2, zero=1, cp=2),
        Layout(dp_shard=8, zero=3),
        Layout(dp_replicate=2, dp_shard=4, zero=3, recompute="full"),
        Layout(cp=8, zero=3),
    ],
)
def test_data_parallel_messages_take_what_a_step_without_any_cover_is_charged(of, layout):
    seconds, charged, _ = sent(job(of=of, engine=IN_TURN), layout, "dp")
    assert charged > 0
    assert seconds == pytest.approx(charged, rel=1e-9)
    _, covered, exposed = sent(job(of=of), layout, "dp")
    assert exposed == pytest.approx(covered)
    assert covered <= charged * 1.0001


def test_gradients_in_messages_of_the_engines_size_take_what_the_step_is_charged():
    bucketed = replace(IN_TURN, message_bytes=40e6)
    for layout in (Layout(dp_replicate=8), Layout(dp_shard=8, zero=1), Layout(dp_replicate=2, dp_shard=4, zero=2)):
        seconds, charged, _ = sent(job(of=DENSE, engine=bucketed, links=FAR), layout, "dp")
        assert seconds == pytest.approx(charged, rel=1e-9)


def test_the_last_rank_of_a_pipeline_sends_what_the_step_is_charged():
    """It has the head, and a copy of a tied table; its last layer is gathered once per microbatch."""
    for of in (DENSE, EXPERTS, TIED):
        layout = Layout(pp=2, dp_shard=4, zero=3)
        seconds, charged, _ = sent(job(of=of, engine=IN_TURN), layout, "dp", rank=1)
        assert seconds == pytest.approx(charged, rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=8),
        Layout(dp_shard=8, zero=1),
        Layout(pp=2, tp=4),
        Layout(pp=2, dp_replicate=2, dp_shard=2, zero=1),
        Layout(pp=2, dp_replicate=4),
    ],
)
def test_the_norm_of_the_gradient_is_charged_what_its_message_takes(layout):
    planned_job = job(of=model(8), links=FAR, engine=IN_TURN)
    result = estimate(planned_job, layout)
    (norm,) = (entry for entry in result.collectives if entry.what == "norm")
    assert norm.link == "overseas"
    assert norm.seconds >= 2 * 0.1
    others = sum(entry.seconds for entry in result.collectives if entry.axis.startswith("dp"))
    assert dict(result.time)["dp"] - others == pytest.approx(norm.seconds, rel=0.02)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4, dp_replicate=2),
        Layout(pp=2, stages=2, schedule="interleaved", dp_replicate=4),
        Layout(pp=4, stages=2, schedule="zb-v", tp=2),
        Layout(pp=8, schedule="gpipe"),
    ],
)
def test_a_pipeline_rank_sends_what_its_actions_make(layout):
    """Every forward except the last stage's is sent on, and every input gradient except the first stage's is sent back,
    unless the neighbouring stage is on the same rank."""
    planned_job = job(of=DENSE)
    microbatches, last = planned_job.batch.microbatches(layout), layout.pp * layout.stages - 1
    lists = actions(layout.schedule, layout.pp, layout.stages, microbatches)
    for rank, program in enumerate(lists):
        own = {entry.stage for entry in program}
        made = Counter(
            "forward" if entry.kind == "F" else "backward"
            for entry in program
            if (entry.kind == "F" and entry.stage != last and entry.stage + 1 not in own)
            or (entry.kind in "BI" and entry.stage != 0 and entry.stage - 1 not in own)
        )
        listed = {entry.when: entry for entry in collectives(planned_job, layout, rank) if entry.axis == "pp"}
        assert {when: entry.count for when, entry in listed.items()} == dict(made)
        size = 2 * layout.microbatch * planned_job.batch.seq_len * planned_job.model.hidden_size / layout.tp
        assert all(entry.bytes == size for entry in listed.values())


@pytest.mark.parametrize(
    ("layout", "elements"),
    [
        (Layout(pp=2, dp_replicate=4), 32000 * 4096),
        (Layout(pp=4, tp=2), 32000 * 4096 / 2),
        (Layout(pp=2, dp_shard=4, zero=1), 32000 * 4096 / 4),
        (Layout(pp=2, stages=2, schedule="zb-v", dp_replicate=4), 0),
        (Layout(dp_replicate=8), 0),
        (Layout(pp=64, dp_replicate=2), 32000 * 4096),
    ],
)
def test_the_gradients_of_a_tied_table_are_charged_what_their_message_takes(layout, elements):
    """First and last rank each list it; a pipeline of 64 ranks is too deep to be simulated."""
    nodes = max(2, layout.world_size // 4)
    tied, apart = (job(of=replace(of, layers=of.layers * 8), links=FAR, nodes=nodes) for of in (TIED, DENSE))
    made = estimate(tied, layout)
    listed = [
        [entry for entry in exposed_collectives(tied, layout, dict(made.time), rank) if entry.what == TIED_GRADS]
        for rank in (0, layout.pp - 1)
    ]
    assert [sum(entry.bytes for entry in own) for own in listed] == [4 * elements] * 2
    seconds = sum(entry.seconds for entry in listed[0])
    assert sum(entry.exposed for entry in listed[0]) == pytest.approx(seconds)
    more = dict(made.time)["pp"] - dict(estimate(apart, layout).time)["pp"]
    assert more == pytest.approx(seconds, rel=1e-6, abs=1e-9)


def test_what_is_exposed_is_dealt_out_by_how_long_messages_take():
    planned_job, layout = job(of=DENSE), Layout(pp=2, tp=2, dp_shard=2, zero=1)
    result = estimate(planned_job, layout)
    for axis in ("tp", "pp", "dp"):
        every = [entry for entry in result.collectives if entry.what != PARTIAL_GRADS]
        own = [entry for entry in every if entry.axis.startswith(axis) or (axis == "dp" and entry.axis == "world")]
        assert sum(entry.exposed for entry in own) <= dict(result.time)[axis] * (1 + 1e-9)
        assert len({round(entry.exposed / entry.seconds, 9) for entry in own}) == 1


def test_messages_of_one_kind_are_listed_once():
    listed = collectives(job(of=DENSE), Layout(dp_shard=8, zero=3))
    assert len({replace(entry, count=0) for entry in listed}) == len(listed)
    assert all(entry.degree > 1 and entry.bytes > 0 and entry.count > 0 for entry in listed)


@pytest.mark.parametrize(
    ("layout", "links"),
    [
        (Layout(tp=4, dp_shard=2, zero=1), {"tp": "inside", "dp_shard": "network", "world": "network"}),
        (
            Layout(dp_replicate=2, dp_shard=4, zero=3),
            {"dp_shard": "inside", "dp_replicate": "network", "world": "inside"},
        ),
        (Layout(pp=2, dp_replicate=4), {"pp": "network", "dp": "inside", "world": "network"}),
    ],
)
def test_messages_are_charged_to_the_link_that_their_group_crosses(layout, links):
    result = estimate(job(of=DENSE), layout).collectives
    assert {entry.axis: entry.link for entry in result} == {
        axis: links[axis] for axis in {entry.axis for entry in result}
    }


def test_where_no_link_is_known_messages_take_no_time():
    planned_job = job(of=DENSE)
    bare = replace(planned_job, cluster=ClusterSpec("test", planned_job.cluster.device, 4, 2))
    result = estimate(bare, Layout(dp_shard=8, zero=3))
    assert result.collectives
    assert all(entry.seconds == entry.exposed == 0 and entry.link == "" for entry in result.collectives)
    assert dict(result.time)["dp"] == 0
