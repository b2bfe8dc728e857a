"""Files of runs and of plans are described in the same way."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from kumi.cli import main
from kumi.errors import ConfigError, LayoutError
from kumi.report.run_description import describe_run_file
from kumi.spec.layout import Layout

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA, MIXTRAL, QUICKSTART = (
    str(EXAMPLES / f"{name}.toml") for name in ("plan/llama-3-70b-aws", "plan/mixtral-8x7b", "quickstart")
)
PINS = ["layout.pp=4", "layout.tp=8", "layout.dp_replicate=2", "layout.zero=0", "layout.schedule=1f1b"]


def test_a_file_of_a_plan_is_described_with_the_layout_that_it_pins():
    description = describe_run_file(LLAMA, PINS)
    layout = Layout(**{**description["layout"], "stage_layers": tuple(description["layout"]["stage_layers"])})
    assert (layout.pp, layout.tp, layout.dp_replicate) == (4, 8, 2)
    assert {one["axis"]: one["stride"] for one in description["placement"]["axes"]} == {
        "pp": 16,
        "dp_replicate": 8,
        "tp": 1,
    }
    assert "steps" not in description["batch"]


def test_the_experts_of_a_plan_have_axes_of_their_own():
    pins = ["layout.pp=1", "layout.tp=4", "layout.dp_shard=16", "layout.ep=8", "layout.zero=3", "layout.expert_tp=1"]
    degrees = {one["axis"]: one["degree"] for one in describe_run_file(MIXTRAL, pins)["placement"]["axes"]}
    assert (degrees["ep"], degrees["expert_dp"]) == (8, 8)


def test_four_bit_matrices_are_named_with_their_bytes(capsys):
    words = ["describe", str(EXAMPLES / "plan/qlora-70b-two-cards.toml"), "layout.offload=states", "layout.zero=3"]
    assert main([*words, "layout.microbatch=2", "layout.recompute=full"]) == 0
    assert "68.5B frozen parameters in four bits (nf4): 35.9 GiB, over 2 ranks" in capsys.readouterr().out
    assert main(["describe", LLAMA, *PINS]) == 0
    assert "four bits" not in capsys.readouterr().out


def test_what_is_illegal_is_refused_with_its_reason():
    with pytest.raises(LayoutError, match="tp=3 does not divide"):
        describe_run_file(LLAMA, ["layout.tp=3"])


def test_half_a_run_file_is_no_plan():
    with pytest.raises(ConfigError, match="data: required"):
        describe_run_file(LLAMA, ["train.steps=3", "train.out=runs/x"])


def test_the_resolved_run_file_has_the_layout(capsys):
    assert main(["describe", QUICKSTART, "--resolved", "layout.zero=3", "--json"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert Layout(**layout) == Layout(
        **{**describe_run_file(QUICKSTART, ["layout.zero=3"])["layout"], "stage_layers": ()}
    )
    assert (layout["zero"], layout["dp_shard"]) == (3, 2)
    assert main(["describe", QUICKSTART, "--resolved", "layout.zero=3"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["layout"] == layout


def test_both_kinds_are_printed(capsys):
    assert main(["describe", LLAMA, *PINS]) == 0
    output = capsys.readouterr().out
    assert "plan, only planned" in output
    assert "pp 4 (1f1b), dp_replicate 2, tp 8" in output
    assert "rank = 16 pp + 8 dp_replicate + tp; node = rank // 8" in output
    assert main(["describe", QUICKSTART]) == 0
    output = capsys.readouterr().out
    assert "quickstart -> runs/quickstart" in output
    assert "node 0: ranks 0 to 1" in output
