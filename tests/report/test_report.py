import json
import tomllib
from dataclasses import replace

import pytest
from examples import CHOSEN, best, copies, estimate, job, memory, report, runner_up, sharded
from hypothesis import given
from hypothesis import strategies as st

from kumi.config.job_sections import LayoutSection
from kumi.plan.report import Report
from kumi.report import phrases, quantities
from kumi.report.bottleneck import STAGE_IMBALANCE, bottlenecks, levers
from kumi.report.quantities import gap, savings_needed, stage_groups, traffic
from kumi.report.summary import headline
from kumi.spec.layout import OFFLOAD, RECOMPUTE, Layout
from kumi.spec.schedules import SCHEDULES


def test_as_dict_is_strict_json_with_every_part():
    data = json.loads(json.dumps(report().as_dict(), allow_nan=False))
    assert data["model"]["parameters"] == 70_553_706_496
    assert data["cluster"]["devices"] == 64
    assert data["best"]["step_seconds"] == pytest.approx(10.0)
    assert [item["estimate"] is None for item in data["expected"]] == [False, False, True]
    assert data["expected"][2]["problems"] == ["tp=16 does not divide 8 heads; use 8"]
    assert [len(data[name]) for name in ("others", "front", "lacking")] == [3, 3, 1]
    assert (data["searched"], data["fitting"]) == (12345, 678)


def test_the_headline_says_speed_memory_and_the_convention_of_mfu():
    text = "\n".join(headline(report()))
    assert "TP 8 x PP 4 (1f1b) x ZeRO-1 over 2" in text
    assert "105k tokens/s (1,638 per device); 10.0 s per step, +/- 8.0%" in text
    assert f"MFU {100 * best().mfu:.0f}% (full attention counted, recomputation not counted)" in text
    assert "memory 55 GiB of 72 GiB usable (80 GiB device), on pp rank 0 (the fullest)" in text
    assert "DOES NOT FIT" not in text
    assert "DOES NOT FIT" in "".join(headline(Report(job(), copies())))


def test_the_headline_says_what_it_costs_and_what_was_assumed():
    made = report()
    assert headline(made)[-2] == "a billion tokens take 170 device hours"
    assert headline(made)[-1].startswith("assumed: every row is one document;")
    short = replace(made.job, batch=replace(made.job.batch, document_span=512.0))
    assert headline(replace(made, job=short))[-1] == "a billion tokens take 170 device hours"
    device = replace(made.job.cluster.device, price=2.5, watts=700.0)
    cluster = replace(made.job.cluster, device=device, assumed=("NVLink: latency",))
    model = replace(made.job.model, notes=("one head is not counted",))
    rich = replace(made, job=replace(short, cluster=cluster, model=model), best=best(host_memory=2**34))
    assert headline(rich)[-4:] == [
        "host memory 16 GiB per device",
        "a billion tokens take 170 device hours, 424 at 2.5 per device hour, 119 kWh at 700 W per device",
        "note: one head is not counted",
        "assumed, not measured: NVLink: latency",
    ]


layouts = st.builds(
    Layout,
    **{axis: st.integers(1, 64) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch")},
    zero=st.integers(0, 3),
    recompute=st.sampled_from(RECOMPUTE),
    recompute_layers=st.none() | st.integers(1, 9),
    sequence_parallel=st.booleans(),
    schedule=st.sampled_from(list(SCHEDULES)),
    stages=st.integers(1, 4),
    stage_layers=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    offload=st.sampled_from(OFFLOAD),
)


@given(layouts)
def test_run_files_take_the_toml_of_a_layout(layout):
    read = tomllib.loads(phrases.layout_toml(layout))["layout"]
    pinned = LayoutSection(**read).model_dump(exclude_none=True)
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in pinned.items()} == read


@given(layouts)
def test_the_toml_of_a_layout_gives_the_layout_back(layout):
    read = tomllib.loads(phrases.layout_toml(layout))["layout"]
    assert (
        Layout(**{name: tuple(value) if isinstance(value, list) else value for name, value in read.items()}) == layout
    )


def test_every_layout_that_differs_reads_differently():
    changes = (
        {"tp": 2},
        {"cp": 2},
        {"ep": 2},
        {"pp": 2},
        {"dp_shard": 4},
        {"dp_replicate": 2},
        {"zero": 3},
        {"microbatch": 2},
        {"recompute": "none"},
        {"schedule": "gpipe"},
        {"stages": 2},
        {"offload": "states"},
        {"stage_layers": (20, 20, 20, 20)},
        {"recompute_layers": 3},
    )
    words = {phrases.layout_words(replace(CHOSEN, **change)) for change in ({}, *changes)}
    assert len(words) == len(changes) + 1
    assert phrases.layout_words(Layout()) == "one device, microbatch 1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (123.4, "123 s"),
        (12.34, "12.3 s"),
        (1, "1.00 s"),
        (0.9996, "1000 ms"),
        (0.31, "310 ms"),
        (0.0042, "4.20 ms"),
        (0.000042, "0.042 ms"),
    ],
)
def test_seconds_have_three_digits_and_no_exponent(value, text):
    assert phrases.seconds(value) == text


def test_nearly_all_is_not_called_all():
    assert [phrases.percent(share) for share in (0, 0.004, 0.25, 0.996, 1, 1.5)] == [
        "0%",
        "0.4%",
        "25%",
        "99.6%",
        "100%",
        "150%",
    ]


def test_equal_neighbouring_ranks_are_one_group():
    same, other = memory(params=1), memory(params=2)
    made = estimate(replace(CHOSEN, pp=5), dict(best().time), (same, same, same, other, same))
    assert [(group.first, group.last) for group in stage_groups(made)] == [(0, 2), (3, 3), (4, 4)]


@given(st.integers(1, 200), st.integers(3, 20), st.data())
def test_a_pick_of_ranks_has_the_ends_and_the_wanted_one(count, most, data):
    rank = data.draw(st.integers(0, count - 1))
    picked = quantities.pick(count, most, rank)
    assert picked == sorted(set(picked))
    assert {0, count - 1, rank} <= set(picked) <= set(range(count))
    assert len(picked) <= most


def test_a_gap_names_what_is_lost_and_what_would_have_to_be_gained():
    text = gap(best(), sharded())
    assert text.seconds == pytest.approx(3.0)
    assert not text.noise
    assert text.losses[0] == ("dp", pytest.approx(4.2))
    assert savings_needed(text) == "3.00 s less exposed dp communication"


def test_a_gap_is_that_of_equal_tokens_in_every_kind():
    """Half of the tokens in 5.5 s equal all of them in 11 s, with twice the time of every kind."""
    half = replace(sharded(dp=2.3), tokens_per_step=best().tokens_per_step // 2)
    time = {kind: seconds / 2 for kind, seconds in half.time}
    half = replace(half, time=tuple(time.items()), step_seconds=sum(time.values()))
    assert sum(time.values()) == pytest.approx(5.5)
    text = gap(best(), half)
    assert text.seconds == pytest.approx(1.0)
    assert dict(text.losses)["dp"] == pytest.approx(2.2)
    assert savings_needed(text) == "1.00 s less exposed dp communication"


def test_what_one_kind_cannot_close_others_must():
    time = dict(best().time)
    slower = estimate(CHOSEN, time | {"tp": 2.0, "bubble": 2.0, "dp": 0.4, "optimizer": 0.4}, best().memory)
    assert (
        savings_needed(gap(best(), slower))
        == "1.00 s less exposed tp communication and 500 ms less pipeline bubble and 500 ms elsewhere"
    )


def test_a_gap_below_the_models_error_is_noise():
    assert gap(best(), runner_up("bubble", 0.79, CHOSEN)).noise
    assert not gap(best(), runner_up("bubble", 0.81, CHOSEN)).noise


def test_traffic_counts_what_a_ring_sends_against_what_the_group_has():
    rows = {row.axis: row for row in traffic(job(), best())}
    assert rows["tp"].sent == pytest.approx(2 * 2560 * 128e6 * 7 / 8)
    assert (rows["tp"].busy, rows["tp"].exposed) == (2.0, 1.0)
    assert rows["tp"].bandwidth == 450e9
    assert rows["pp"].sent == 128 * 16e6
    # Two ranks of the group are 8 apart, so each has a node, and its network card, to itself.
    assert rows["dp_shard"].bandwidth == 50e9
    assert rows["tp"].latency == pytest.approx(1 - rows["tp"].sent / (450e9 * 0.8 * 2.0))


def test_a_ring_over_all_devices_of_a_node_has_all_their_network_cards():
    (row,) = traffic(job(), sharded())
    assert row.bandwidth == 8 * 50e9


def test_arithmetic_binds_unless_something_takes_longer():
    assert bottlenecks(report())[0] == (
        "Compute-bound: forward and backward take 69% of the step. The largest other part is pipeline bubble: 1.50 s, "
        "15% of the step."
    )
    slow = replace(report(), best=sharded(dp=7.0))
    even = replace(report(), best=sharded(dp=6.0))
    assert bottlenecks(even)[0] == (
        "No single bottleneck: forward and backward take 44% of the step, and the largest other part is exposed dp "
        "communication: 6.00 s, 41%."
    )
    assert bottlenecks(slow)[0].startswith("Exposed dp communication is the bottleneck: it takes 7.00 s of the 15.7 s")


def test_memory_binds_where_it_is_full_or_keeps_something_faster_out():
    assert bottlenecks(report())[1].startswith(
        "Memory has room, but not for a faster layout: the fullest rank needs 55 GiB of the 72 GiB usable (76%)"
    )
    assert bottlenecks(report())[2].startswith("With 8 GiB more memory per device, TP 8 x PP 4 (1f1b) x ZeRO-1 over 2")
    alone = Report(job(), best())
    assert len(bottlenecks(alone)) == 2
    # Twice the memory is the most that is advised.
    small, smaller = (replace(best(), usable=size * 2**30) for size in (40, 39))
    faster = [replace(report().lacking[0], usable=plan.usable) for plan in (small, smaller)]
    assert len(bottlenecks(replace(report(), best=small, lacking=(faster[0],), expected=()))) == 3
    assert len(bottlenecks(replace(report(), best=smaller, lacking=(faster[1],), expected=()))) == 2
    assert bottlenecks(alone)[1].startswith("Memory is not a limit")
    assert bottlenecks(Report(job(), best(usable=56 * 2**30)))[1].startswith("Memory is nearly full")


def test_levers_are_what_each_resource_could_save_at_most():
    seconds = {lever.what: lever.seconds for lever in levers(report())}
    assert seconds["devices with 10% more FLOP/s"] == pytest.approx((2.3 + 4.6 + 0.3 + 1.5) * (1 - 1 / 1.1))
    waits = 1 + (1 + STAGE_IMBALANCE) * 1.5 / (
        2.3 + 4.6 + 0.3 + 1.0
    )  # the bubble, relative to compute and tp traffic of all microbatches
    assert seconds["enough memory to recompute nothing"] == pytest.approx(waits * 0.3)
    assert seconds["twice the tokens per step"] == pytest.approx((1.5 + 0.2 + 0.1) / 2)
    sent = 2 * 2560 * 128e6 * 7 / 8 / (450e9 * 0.8)
    assert seconds["10% more bandwidth on NVLink"] == pytest.approx(waits * sent * (1 - 1 / 1.1))
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)


def test_what_would_buy_nothing_is_left_out():
    hidden = tuple(replace(item, exposed=0.0) for item in best().collectives)
    assert not any("NVLink" in lever.what for lever in levers(Report(job(), best(collectives=hidden))))
