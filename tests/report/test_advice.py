from dataclasses import replace

import pytest
from examples import CHOSEN, LINKS, SHARDED, best, copies, estimate, job, memory, one_device, report, runner_up, sharded

from kumi.plan.report import Report, StandardLayout
from kumi.plan.standard_layouts import estimate_standard_layouts, standard_layouts
from kumi.report.advice import advice, verdict
from kumi.spec.cluster import Host
from kumi.spec.layout import Layout

PLAIN = Layout(dp_replicate=64)


def advised(made):
    return " ".join(advice(made))


def whole(gib, *, devices=64):
    """Plain data parallelism that needs `gib` GiB."""
    layout = Layout(dp_replicate=devices)
    return StandardLayout(
        "DDP", layout, estimate=estimate(layout, {"forward": 4.0, "backward": 8.0}, (memory(params=gib),))
    )


def test_whether_a_whole_copy_fits_decides_whether_states_are_divided():
    assert "needs 1.07 TiB per device, 15x the 72 GiB usable: the states must be sharded" in advised(report())
    roomy = Report(job(), best(), expected=(whole(70),))
    assert "fits on one device (70 GiB of 72 GiB usable): memory does not require sharding" in advised(roomy)
    alone = estimate(Layout(), {"forward": 1.0, "backward": 2.0}, (memory(params=90),))
    single = Report(one_device(), alone, expected=(StandardLayout("Plain", Layout(), estimate=alone),))
    assert "the states must be offloaded to the host" in advised(single)


def test_a_network_is_slow_when_fsdp_would_wait_for_it():
    assert (
        "450 GB/s inside its node (NVLink) and 50.0 GB/s to the most distant devices (InfiniBand), 9.0x less"
        in advised(report())
    )
    assert "would wait for communication for 33% of the step: the network is slow for this job" in advised(report())
    hidden = Report(job(), best(), expected=(StandardLayout("FSDP", SHARDED, estimate=sharded(dp=0.0)),))
    assert "would hide its communication behind compute: the network is fast enough for this job" in advised(hidden)
    node = Report(job(nodes=1), best(), expected=hidden.expected)
    assert "Devices are connected by NVLink, 450 GB/s each" in advised(node)


def test_a_layer_that_does_not_fit_must_itself_be_cut():
    assert "The largest layer does not fit" not in advised(report())
    small = best(usable=2**30)
    text = advised(Report(job(), small))
    assert "The largest layer does not fit: ZeRO-3 gathers two layers at a time, 3.91 GiB, and 1 GiB are usable" in text


@pytest.mark.parametrize(
    ("layers", "words"),
    [(2, "suggests DDP for"), (40, "suggests FSDP for"), (160, "suggests 3D parallelism for"), (96, "")],
)
def test_the_rule_by_size_is_held_against_the_estimates(layers, words):
    made = job(num_hidden_layers=layers)
    items = [
        StandardLayout("DDP", PLAIN, estimate=copies()),
        StandardLayout("FSDP", SHARDED, estimate=sharded()),
        StandardLayout("Megatron", CHOSEN, estimate=best()),
    ]
    text = advised(Report(made, best(), expected=tuple(items)))
    assert (words in text) if words else ("rule of thumb by size" not in text)


def test_why_the_chosen_one_wins_names_the_terms_that_differ():
    assert (
        "Of the standard layouts, FSDP (ZeRO-3) over all devices comes closest. The chosen layout saves 4.20 s of "
        "exposed dp communication and 1.80 s of recomputation at the cost of 1.50 s of pipeline bubble and 1.00 s of "
        "exposed tp communication."
    ) in advised(report())


def test_a_rival_within_the_models_error_is_worth_measuring():
    near = StandardLayout("Megatron", replace(CHOSEN, pp=2), estimate=runner_up("tp", 0.5, replace(CHOSEN, pp=2)))
    text = advised(Report(job(), best(), expected=(near,)))
    assert "Megatron is 500 ms per step slower, within the model's error of 8.0%: take the one that is simpler" in text
    same = StandardLayout("Megatron", CHOSEN, estimate=best())
    assert "The choice is a standard layout: Megatron." in advised(Report(job(), best(), expected=(same,)))


def test_what_pins_rule_out_is_said_when_it_would_be_faster():
    faster = StandardLayout("FSDP", SHARDED, estimate=sharded(dp=0.0))
    assert "FSDP would take 8.70 s per step instead of 10.0 s; the pinned fields rule it out." in advised(
        Report(job(), best(), expected=(faster,))
    )
    assert verdict(faster, best()) == "0.87x the time: ruled out by the pinned fields."
    near = StandardLayout("HSDP", SHARDED, estimate=sharded(dp=1.0))
    assert verdict(near, best()) == "0.97x the time: as fast, within the model's error."
    assert "HSDP is as fast, within the model's error of 8.0%" in advised(Report(job(), best(), expected=(near,)))


def test_nothing_expected_that_runs_is_said():
    none = Report(
        job(), best(), expected=(StandardLayout("DDP", PLAIN, estimate=copies()), StandardLayout("TP", PLAIN, ("no",)))
    )
    assert "None of the standard layouts can run here" in advised(none)
    assert "None of the standard layouts" not in advised(Report(job(), best()))


def test_verdicts():
    items = {item.title: verdict(item, best()) for item in report().expected}
    ddp = "Does not fit: each device needs 1.07 TiB, 15x the usable memory."
    assert items["DDP (a full replica per device)"] == ddp
    fsdp = "1.3x the time: needs 3.00 s less exposed dp communication to match."
    assert items["FSDP (ZeRO-3) over all devices"] == fsdp
    assert items["TP in nodes, FSDP across"] == "Refused: tp=16 does not divide 8 heads; use 8."
    assert verdict(StandardLayout("", CHOSEN, estimate=best()), best()).startswith("The chosen layout")
    assert "(within the model's error)" in verdict(
        StandardLayout("", PLAIN, estimate=runner_up("dp", 0.1, PLAIN)), best()
    )


def test_what_one_would_expect_of_a_cluster():
    layouts = dict(standard_layouts(job()))
    assert list(layouts) == [
        "DDP (a full replica per device)",
        "DeepSpeed ZeRO-2 over all devices",
        "FSDP (ZeRO-3) over all devices",
        "HSDP (shard in nodes, replicate across)",
        "TP in nodes, FSDP across",
        "Megatron-LM (TP x PP, ZeRO-1)",
    ]
    assert all(layout.world_size == 64 for layout in layouts.values())
    assert layouts["HSDP (shard in nodes, replicate across)"].dp_replicate == 8
    assert layouts["TP in nodes, FSDP across"].tp == 8
    assert layouts["FSDP (ZeRO-3) over all devices"].microbatch == 2


def test_megatron_takes_as_much_tp_and_pp_as_the_states_need():
    """By its rule of 6 + 12 / dp bytes: a 1B unsharded, a 12B with tp = 2, a 70B over two nodes, a 400B over eight."""
    sizes = [
        {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16},
        {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40},
        {},
        {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 126},
    ]
    layouts = [dict(standard_layouts(job(**config)))["Megatron-LM (TP x PP, ZeRO-1)"] for config in sizes]
    assert [(layout.tp, layout.pp) for layout in layouts] == [(1, 1), (2, 1), (8, 2), (8, 8)]


def test_tp_goes_no_further_than_the_heads():
    layouts = dict(standard_layouts(job(num_key_value_heads=2)))
    assert layouts["TP in nodes, FSDP across"].tp == 2


def test_a_single_device_is_expected_to_offload_where_there_is_a_host_to_take_it():
    bare = one_device()
    assert [title for title, _ in standard_layouts(bare)] == ["No offload (all states on the device)"]
    host = Host(2**40, 50e9, 6e9, 2**42)
    rich = replace(bare, cluster=replace(bare.cluster, host=host))
    assert [layout.offload for _, layout in standard_layouts(rich)] == ["none", "optimizer", "states", "states-nvme"]


def test_expected_layouts_are_estimated_the_fastest_way_that_fits():
    made = job(
        nodes=1, sequences=64, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_hidden_layers=16
    )
    by_title = {item.title: item for item in estimate_standard_layouts(made)}
    assert list(by_title) == [title for title, _ in standard_layouts(made)]
    ddp = by_title["DDP (a full replica per device)"]
    assert ddp.fits
    assert ddp.estimate.layout.dp_replicate == 8
    huge = {item.title: item for item in estimate_standard_layouts(replace(job(nodes=1, sequences=64)))}
    ddp = huge["DDP (a full replica per device)"]
    assert not ddp.fits
    assert ddp.estimate.layout.recompute == "full"


def test_what_is_illegal_comes_with_its_reasons():
    by_title = {item.title: item for item in estimate_standard_layouts(job(nodes=1, sequences=4, links=LINKS))}
    ddp = by_title["DDP (a full replica per device)"]
    assert ddp.estimate is None
    assert any("does not divide the 4 sequences" in problem for problem in ddp.problems)
