"""Requests of `kumi plan` that nobody means well: each is answered, or refused in one sentence that is true."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from examples import estimate, memory
from examples import job as report_job
from small import HOST, job, model

from kumi.errors import FitError, LayoutError
from kumi.plan.estimate import estimate as plain
from kumi.plan.report import Report
from kumi.plan.session import plan
from kumi.report import phrases
from kumi.report.advice import advice, verdict
from kumi.report.bottleneck import WORTH, bottlenecks, levers
from kumi.report.summary import headline
from kumi.spec.checks import layout_unsupported_by_trainer
from kumi.spec.layout import Layout


def refused(job, pinned, **fields):
    with pytest.raises(LayoutError) as error:
        plan(job, pinned, **fields)
    return str(error.value)


def test_pins_that_are_refused_are_not_blamed_for_what_was_left_open():
    """Stages and ZeRO stage are not pinned, so their defaults are not to blame."""
    message = refused(job(of=model(16), sequences=8), {"schedule": "dualpipe", "pp": 8})
    assert "needs at least 2 x pp = 16 microbatches" in message
    for pinned in ({"pp": 2, "dp_shard": 3}, {"dp_replicate": 3}):
        message = refused(job(), pinned)
        assert "choose degrees with a product of 8" in message
        assert "zero" not in message


def test_a_schedule_without_a_pipeline_is_refused_with_the_reason():
    assert "layout.pp=1 has none" in refused(job(), {"schedule": "zb-v", "pp": 1})


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(cp=16, zero=2), "CP 16 x ZeRO-2 over CP"),
        (Layout(cp=8, dp_replicate=2, zero=3), "CP 8 x FSDP (ZeRO-3) over CP, 2 replicas"),
        (Layout(cp=8, dp_shard=2, zero=1), "CP 8 x ZeRO-1 over 2 x CP"),
        (Layout(cp=8), "CP 8"),
        (Layout(cp=8, context="ulysses"), "CP 8 (ulysses)"),
        (Layout(ep=8, expert_tp=2, dp_shard=16, zero=2), "EP 8 x ETP 2 x ZeRO-2 over 16"),
    ],
)
def test_layouts_that_differ_have_different_names(layout, words):
    """Context-parallel ranks divide the states, and expert tensor parallelism is a degree of its own."""
    assert phrases.arrangement(layout) == words


def test_most_of_the_memory_is_more_than_half_of_it():
    for size, part in ((20, "the largest part is activations (20 GiB)"), (24, "most of it is activations (24 GiB)")):
        estimated = estimate(
            Layout(), {"forward": 1.0, "backward": 2.0}, (memory(activations=size, params=12, optimizer=10),)
        )
        assert part in bottlenecks(Report(report_job(), estimated))[1]


def test_machines_without_links_are_said_to_send_for_nothing():
    workload = job(links=())
    assert "communication is estimated as free" in "\n".join(headline(plan(workload, {"pp": 1, "cp": 1, "tp": 1})))
    assert "estimated as free" not in "\n".join(headline(plan(job(), {"pp": 1, "cp": 1, "tp": 1})))


def test_a_device_that_holds_next_to_nothing_is_too_small():
    with pytest.raises(FitError, match=r"the model does not fit: .* needs .* per device, and GPU has 0 B usable"):
        plan(job(memory=1), {"pp": 1, "cp": 1, "tp": 1})


def test_more_devices_than_anyone_has_are_refused_at_once():
    assert "has 4000000000000 devices, and a search takes at most 1048576" in refused(job(10**12), {})


def faster(job, name):
    links = (
        replace(link, bandwidth=1.1 * link.bandwidth * (link.name == name) or link.bandwidth)
        for link in job.cluster.links
    )
    return replace(job, cluster=replace(job.cluster, links=tuple(links)))


@pytest.mark.parametrize(
    ("fields", "pinned"),
    [
        ({"of": model(8, hidden=2048)}, {"pp": 4, "tp": 2, "recompute": "full"}),
        ({"of": model(8, hidden=2048), "host": HOST, "sequences": 8}, {"zero": 3, "offload": "optimizer"}),
        ({"of": model(8, experts=8, hidden=1024)}, {"ep": 8, "tp": 1, "pp": 1, "cp": 1}),
    ],
)
def test_what_more_would_buy_is_no_less_than_what_it_buys(fields, pinned):
    """Compare each bound with the estimate of the same layout with more of the resource."""
    workload = job(**fields)
    report = plan(workload, pinned)
    best = report.best
    claimed = {lever.what: lever.seconds for lever in levers(report)}
    tokens = replace(workload.batch, tokens_per_step=2 * workload.batch.tokens_per_step)
    bought = {
        f"10% more bandwidth on {link.name}": plain(faster(workload, link.name), best.layout).step_seconds
        for link in workload.cluster.links
    }
    bought["twice the tokens per step"] = plain(replace(workload, batch=tokens), best.layout).step_seconds / 2
    bought["enough memory to recompute nothing"] = plain(
        workload, replace(best.layout, recompute="none", recompute_layers=None)
    ).step_seconds
    for what, seconds in bought.items():
        assert best.step_seconds - seconds <= 1.001 * claimed.get(what, WORTH * best.step_seconds), what


def test_what_a_trainer_rules_out_is_not_blamed_on_pins():
    """No field is pinned, and the trainer does not have tensor parallelism."""
    report = plan(job(of=model(8, hidden=2048)), {}, unsupported=lambda _, layout: ["no tp"] * (layout.tp > 1))
    verdicts = {item.title: verdict(item, report.best) for item in report.expected}
    assert verdicts["TP in nodes, FSDP across"].endswith("the time, but not supported: no tp.")
    assert not any("pinned" in sentence for sentence in (*verdicts.values(), *advice(report)))


def test_what_this_version_does_not_train_is_ruled_out_where_that_is_asked_for():
    """Rows of experts that the ranks of a shard do not divide: legal, and not trained."""
    workload = job(of=model(8, hidden=2052, experts=8))
    report = plan(workload, {}, trainable=True)
    assert all(not layout_unsupported_by_trainer(workload, one.layout) for one in (report.best, *report.others))
    ruled_out = [
        item for item in report.expected if item.estimate and layout_unsupported_by_trainer(workload, item.layout)
    ]
    assert ruled_out
    assert all("not supported: zero=" in verdict(item, report.best) for item in ruled_out)
