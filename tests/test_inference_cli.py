"""`kumi plan --inference`, from the command line to its figures."""

from __future__ import annotations

import json

import pytest

from kumi.cli import main

MODEL = "examples/models/qwen3-8b"
ONE = [MODEL, "--gpus", "1xh100-sxm", "--inference"]


def _planned(capsys, *words):
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_bytes_and_the_speed(capsys):
    printed = _planned(capsys, *ONE, "--batch-size", "64", "--context", "4096")
    assert printed["model"]["cache_bytes_per_token"] == 147_456
    best = printed["best"]
    assert best["memory"]["cache"] == 64 * 4096 * 147_456
    assert best["sequence_cache"] == 4096 * 147_456
    assert best["fits"]
    assert best["most_sequences"] >= 64
    assert best["step_seconds"] == pytest.approx(sum(best["seconds"].values()))
    assert best["tokens_per_second"] == pytest.approx(64 / best["step_seconds"])
    assert printed["others"] == []


def test_a_node_s_layouts_are_compared(capsys):
    printed = _planned(capsys, MODEL, "--gpus", "4xh100-sxm", "--inference", "--context", "2048", "--batch-size", "100")
    rows = [printed["best"], *printed["others"]]
    assert sorted(row["layout"]["tp"] for row in rows) == [1, 2, 4]
    rates = [row["tokens_per_second"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert all(row["batch"] == 100 and row["replicas"] == 4 // row["layout"]["tp"] for row in rows)


def test_experts_are_shared_or_divided(capsys):
    printed = _planned(capsys, "examples/models/qwen3-30b-a3b", "--gpus", "2xh100-sxm", "--inference", "--top", "9")
    layouts = [row["layout"] for row in (printed["best"], *printed["others"])]
    assert {(row["tp"], row["ep"], row["expert_tp"]) for row in layouts} >= {(1, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 1)}


def test_many_prompts_take_as_long_as_the_slowest_replica(capsys):
    words = ["--prompts", "200", "--prompt-tokens", "100", "--reply-tokens", "300", "--reply-p99", "900"]
    best = _planned(capsys, MODEL, "--gpus", "2xh100-sxm", "--inference", *words, "--batch-size", "32")["best"]
    rollout = best["rollout"]
    assert best["rollout_tokens_per_second"] == pytest.approx(
        200 * 300 / (rollout["prefill"] + rollout["decode"]), rel=0.05
    )
    assert rollout["steps"] >= 900 - 1


def test_the_table_names_what_binds(capsys):
    assert main(["plan", *ONE, "--batch-size", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("qwen3-8b, 8.19B parameters in bfloat16, on NVIDIA H100 80GB HBM3: sequences of 4,096")
    assert "36 GiB" in lines[-1]
    assert "cache" in lines[-1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([MODEL, "--gpus", "1xh100-sxm", "--context", "9"], "--context has no effect without --inference"),
        ([*ONE, "--tokens", "3B"], "--tokens is about training"),
        ([*ONE, "--reply-tokens", "9"], "--reply-tokens has no effect without --prompts"),
        ([*ONE, "--prompts", "9"], "add --reply-tokens N"),
        ([*ONE, "--context", "99999999"], "longer than the model's 40,960 positions"),
        ([*ONE, "--batch-size", "9999"], "use --batch-size 92 or fewer"),
        ([*ONE, "model.source=examples/models/llama-3-70b"], "the weights take at least 131 GiB"),
    ],
)
def test_what_has_no_plan_is_one_sentence(words, text, capsys):
    assert main(["plan", *words]) != 0
    assert text in capsys.readouterr().err
