"""The tutorial on parallelism: its commands run, on less data and fewer steps, and all layouts learn the same."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest

from kumi.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parallelism" / "tutorial.md"

# Steps come down to two, and those of a run that goes on to three; the model, its sequences and the data shrink.
STEPS, ON = 2, 3
SMALL = [
    "data.tokenizer.vocab_size=300",
    "model.config.vocab_size=300",
    "data.workers=1",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "batch.seq_len=32",
    "batch.tokens_per_step=256",
    "eval.sequences=1",
    "export.enabled=false",
    "checkpoint.asynchronous=false",
    "optim.warmup_steps=1",
]


def commands() -> list[list[str]]:
    """The kumi commands on the page, as lists of words."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("kumi ")]


def shrunk(words: list[str]) -> list[str]:
    """The arguments of a small run."""
    if words[1] == "plan":
        return words[1:]
    words = [re.sub(r"trace_step=\d+", f"trace_step={STEPS}", word) for word in words]
    words = [re.sub(r"train.steps=\d+", f"train.steps={ON}", word) for word in words]
    steps = [] if f"train.steps={ON}" in words else [f"train.steps={STEPS}"]
    return [*words[1:3], *SMALL, *steps, *words[3:]]


def losses(folder: Path) -> list[float]:
    """Return the losses of a run's steps, followed by the gradient norms."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "train/loss" in entry]
    return [entry["train/loss"] for entry in steps] + [entry["train/grad_norm"] for entry in steps]


def test_all_layouts_of_the_tutorial_learn_the_same(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = commands()
    assert {"train", "describe", "plan"} == {words[1] for words in lines}
    with contextlib.chdir(tmp_path):
        for words in lines:
            assert main(shrunk(words)) == 0, words
    runs = {
        folder.name: losses(folder) for folder in (tmp_path / "runs" / "parallel").iterdir() if folder.name != "data"
    }
    assert {"one", "ddp", "zero3", "tp", "pp", "ring", "ulysses", "moe", "ep", "all"} == set(runs)
    assert len(runs["one"]) == len(runs["all"]) == 2 * ON
    for name, values in runs.items():
        alone = runs["moe" if name in ("moe", "ep") else "one"]
        if len(values) < len(alone):
            alone = alone[:STEPS] + alone[ON : ON + STEPS]
        assert values == pytest.approx(alone, rel=1e-3), name
    assert (tmp_path / "runs" / "parallel" / "pp" / f"pipeline-step-{STEPS}.svg").exists()
