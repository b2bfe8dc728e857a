"""The tutorial on rewards: its commands run, and on the whole model rewards alone teach the answers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from kumi.cli import main
from kumi.config import load
from kumi.data.gym_source import gym_file

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "reasoning.md"
FORMAT, REASONING = ROOT / "examples" / "format.toml", ROOT / "examples" / "reasoning.toml"
FIGURES = ROOT / "benchmarks" / "results" / "reasoning.json"
# A model that learns nothing, in seconds.
SMALL = ["cluster.devices_per_node=1", "data.workers=1", "train.steps=2"]
OWN = {
    "examples/format.toml": ["model.config.hidden_size=32", "model.config.intermediate_size=32"],
    "examples/reasoning.toml": ["rollout.prompts=4"],
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder with the examples, and a cache of its own."""
    pytest.importorskip("reasoning_gym", reason="needs pip install 'kumi[reasoning]'")
    monkeypatch.setenv("KUMI_CACHE", str(tmp_path / "cache"))
    gym_file.cache_clear()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with contextlib.chdir(tmp_path):
        yield tmp_path


def commands():
    """The kumi commands on the page, as lists of words."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("kumi ")]


def entries(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last(run, name):
    return [entry[name] for entry in entries(run) if name in entry][-1]


def test_the_commands_of_the_page_run(tree):
    lines = commands()
    assert [words[1] for words in lines] == ["train", "train"]
    for words in lines:
        assert main([*words[1:], *SMALL, *OWN[words[2]]]) == 0, words
    assert "rollout/reward/format" in entries(tree / "runs" / "reasoning")[0]
    assert 0 <= last(tree / "runs" / "reasoning", "eval/held-out/accuracy") <= 1


def test_no_held_out_problem_is_trained_on(tree):
    [source] = load(REASONING).data.sources
    [task] = load(REASONING).eval.tasks
    assert load(FORMAT).eval.tasks == (task,)
    drawn, held_out = (
        {json.loads(line)["prompt"] for line in gym_file(path).read_text().splitlines()}
        for path in (source.path, task.path)
    )
    rows = [json.loads(line) for line in (ROOT / "examples" / "reasoning" / "format.jsonl").read_text().splitlines()]
    assert (len(drawn), len(held_out)) == (3000, 200)
    assert {row["prompt"] for row in rows} == drawn
    assert not drawn & held_out


def test_the_replies_of_the_bundled_file_are_right_by_chance_only(tree):
    spec = importlib.util.spec_from_file_location("make_format", ROOT / "examples" / "reasoning" / "make_format.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tree / "format.jsonl")
    content = (tree / "format.jsonl").read_text()
    assert content == (ROOT / "examples" / "reasoning" / "format.jsonl").read_text()
    [source] = load(REASONING).data.sources
    answers = [json.loads(line)["answer"] for line in gym_file(source.path).read_text().splitlines()]
    replies = [json.loads(line)["completion"].removeprefix(" Answer: ") for line in content.splitlines()]
    share = sum(reply == answer for reply, answer in zip(replies, answers, strict=True)) / len(answers)
    assert share < 0.4


@pytest.mark.exhaustive
def test_rewards_alone_teach_the_answers(tree):
    for words in commands():
        assert main([*words[1:], "train.seed=1"]) == 0, words
    runs = tree / "runs"
    first = next(entry for entry in entries(runs / "reasoning") if "rollout/reward/format" in entry)
    assert first["rollout/reward/format"] >= 0.9
    before, after = (last(runs / name, "eval/held-out/accuracy") for name in ("format", "reasoning"))
    assert after >= before + 0.3


def test_the_recorded_figures_meet_the_page_s_claim():
    runs = json.loads(FIGURES.read_text())["runs"]
    assert len(runs) == 3
    for run in runs:
        assert run["well_formed"] >= 0.9
        assert run["accuracy"][-1][1] >= run["accuracy"][0][1] + 0.3


def test_the_picture_is_that_of_the_recorded_figures():
    path = ROOT / "docs" / "images" / "reasoning_curve.py"
    spec = importlib.util.spec_from_file_location("reasoning_curve", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.draw(FIGURES) == (ROOT / "docs" / "images" / "reasoning.svg").read_text()
