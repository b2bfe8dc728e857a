"""The rules of thumb against the figures that guides print for them (70 B parameters, 8 GPUs)."""

from dataclasses import replace

import pytest
from examples import CHOSEN, best, estimate, job, memory, report, sharded

from kumi.plan.estimates import Collective
from kumi.plan.report import Report
from kumi.report import rules_of_thumb
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params

JOB = job(nodes=1, sequences=8)
SIZE = num_params(JOB.model) / 70e9


def plain(layout, collectives=(), time=None, stages=None):
    time = time or {"forward": 1.0, "backward": 2.0}
    return estimate(layout, time, stages or (memory(params=1),) * layout.pp, collectives)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 560), (1, 315), (2, 192.5), (3, 70)])
def test_eight_bytes_per_parameter_on_eight_devices(zero, gigabytes):
    layout = Layout(dp_shard=8, zero=zero) if zero else Layout(dp_replicate=8)
    assert rules_of_thumb.eight_bytes(JOB, plain(layout)).claimed == pytest.approx(gigabytes * 1e9 * SIZE)


def test_sixteen_bytes_per_parameter():
    assert rules_of_thumb.sixteen_bytes(JOB, plain(Layout())).claimed == pytest.approx(16 * 70e9 * SIZE)
    halves = plain(Layout(tp=2, pp=2, dp_shard=2, zero=1))
    assert rules_of_thumb.sixteen_bytes(JOB, halves).claimed == pytest.approx((4 + 12 / 2) * 70e9 * SIZE / 4)


def test_states_count_unsharded_buffers():
    resident = memory(params=5, grads=6, optimizer=7, weights=1, gathered=10, activations=50)
    rule = rules_of_thumb.sixteen_bytes(JOB, plain(Layout(dp_shard=8, zero=3), stages=(resident,)))
    assert rule.estimated == 29 * 2**30
    assert "stores 19 GiB; unsharded weights and gradients take 10 GiB more" in rule.why
    halves = rules_of_thumb.eight_bytes(JOB, plain(Layout(dp_shard=8, zero=2), stages=(resident,)))
    assert halves.estimated == rule.estimated
    assert "; unsharded weights and gradients take 10 GiB more" in halves.why


def test_states_that_are_elsewhere_have_no_such_rule():
    assert rules_of_thumb.sixteen_bytes(JOB, plain(Layout(offload="states"))) is None
    assert rules_of_thumb.sixteen_bytes(JOB, plain(Layout(dp_shard=8, zero=1, ep=8))) is None


def test_activations_by_sixteen_bytes():
    stages = (memory(activations=200),)
    rule = rules_of_thumb.sixteen_activations(JOB, plain(Layout(microbatch=2), stages=stages))
    assert rule.claimed == 16 * 2 * 8192 * 8192 * 80
    assert rule.misleads
    checkpointed = rules_of_thumb.sixteen_activations(JOB, plain(Layout(microbatch=2, recompute="full"), stages=stages))
    assert checkpointed.claimed == pytest.approx(rule.claimed / 80**0.5)
    assert "checkpointed" in checkpointed.name


def test_one_gather_and_one_scatter_of_a_70b_on_eight_devices_is_245_gigabytes():
    layout = Layout(dp_shard=8, zero=3)
    gathered = Collective("all_gather", "dp_shard", 8, 140e9 * SIZE, 2, "forward", link="NVLink", seconds=1.0)
    reduced = Collective("reduce_scatter", "dp_shard", 8, 280e9 * SIZE, 1, "backward", link="NVLink", seconds=1.0)
    rule = rules_of_thumb.gathered_once(JOB, plain(layout, (gathered, reduced)))
    assert rule.claimed == pytest.approx(245e9 * SIZE)
    assert rule.estimated == pytest.approx(2 * 245e9 * SIZE)
    assert rules_of_thumb.gathered_once(JOB, plain(Layout(dp_shard=8, zero=2), (gathered, reduced))) is None


def test_one_all_reduce_a_layer_of_a_70b_at_batch_8_is_42_9_gigabytes():
    short = replace(JOB, batch=replace(JOB.batch, seq_len=4096, tokens_per_step=8 * 4096))
    layer = Collective("all_reduce", "tp", 8, 2 * 4096 * 8192, 4 * 80 * 8, "forward", link="NVLink", seconds=1.0)
    rule = rules_of_thumb.reduced_once(short, plain(Layout(tp=8), (layer,)))
    # A ring sends 2 (n-1) / n of the tensor for an all-reduce.
    assert rule.claimed == pytest.approx(42.9e9 * 2 * 7 / 8, rel=2e-3)
    assert rule.estimated == pytest.approx(4 * rule.claimed)
    assert "4.0 all-reduces" in rule.why


def test_the_bubble_of_four_ranks_and_eight_microbatches_is_27_percent():
    time = {"forward": 1.0, "backward": 2.0, "bubble": 1.0}
    rule = rules_of_thumb.bubble(JOB, plain(Layout(pp=4), time=time))
    assert rule.claimed == pytest.approx(0.2727, abs=1e-4)
    assert rule.estimated == 0.25
    assert not rule.misleads
    assert rules_of_thumb.bubble(JOB, plain(Layout())) is None


def test_the_bubbles_reason_is_what_differs():
    made = best()
    assert "leaves out transfers" in rules_of_thumb.bubble(job(), made).why
    assert "not for zb-v" in rules_of_thumb.bubble(job(), replace(made, layout=replace(CHOSEN, schedule="zb-v"))).why
    head = replace(made.stages[3], forward=2 * made.stages[3].forward)
    why = rules_of_thumb.bubble(job(), replace(made, stages=(*made.stages[:3], head))).why
    assert "the busiest rank has 1.2x the mean" in why


def test_recomputation_is_compared_with_a_third():
    rule = rules_of_thumb.recompute_third(job(), best())
    assert (rule.claimed, rule.estimated) == (pytest.approx(1 / 3), pytest.approx(0.3 / 6.9))
    assert rules_of_thumb.recompute_third(job(), plain(Layout())) is None


def test_latency_is_what_bytes_over_bandwidth_leave_unexplained():
    small = Collective("all_gather", "tp", 8, 8e6, 1000, "forward", link="NVLink", seconds=0.2)
    rule = rules_of_thumb.no_latency(JOB, plain(Layout(tp=8), (small,)))
    assert rule.claimed == pytest.approx(7e9 / (450e9 * 0.8))
    assert rule.estimated == 0.2
    assert rule.misleads


def test_only_what_is_off_by_more_than_a_fifth_is_reported_and_on_whom():
    rules = {rule.name.split(" (")[0]: rule for rule in rules_of_thumb.misleading(report())}
    assert rules["model states take 8 bytes per parameter"].where == ""
    assert rules["FSDP sends one all-gather and one reduce-scatter of bf16 weights per step"].where == (
        "FSDP (ZeRO-3) over all devices"
    )
    assert not any("every stage" in name for name in rules)
    right = Report(job(), sharded())
    assert all(abs(rule.claimed / rule.estimated - 1) > 0.16 for rule in rules_of_thumb.misleading(right))
    assert len(rules_of_thumb.misleading(right)) < len(rules_of_thumb.RULES)
