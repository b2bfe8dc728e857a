"""`--json` of every verb: one JSON object on standard output, everything else on standard error."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forked import run_forked
from kumi.cli import _parser, main
from kumi.cli.json_output import json_output

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "examples" / "quickstart.toml")
MODEL = str(ROOT / "examples" / "models" / "llama-3-8b")
SMALL = [
    'data.sources=[{path="{stdlib}/email/*.py"}]',
    "data.validation=0.2",
    "data.workers=1",
    "eval.every=0",
    "data.tokenizer.vocab_size=400",
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=32",
    "train.steps=2",
    "cluster.devices_per_node=1",
    "sample.prompts=['def ']",
]
PINS = ["layout.pp=1", "layout.cp=1", "layout.tp=1", "layout.microbatch=1", "layout.recompute=full"]

# In this order: later ones read what earlier ones wrote. Each: a verb's words, and keys that its object has.
COMMANDS = [
    (["init", "--out", "first.toml"], {"recipe", "files", "next"}),
    (["init", "--list"], {"recipes"}),
    (["describe", "first.toml"], {"model", "layout", "memory"}),
    (["describe", "first.toml", "--resolved"], {"model", "train"}),
    (["describe", "--schema"], {"$schema", "properties"}),
    (["plan", MODEL, "--gpus", "8xh100-sxm", *PINS], {"best", "training", "defaults"}),
    (["data", "prepare", "first.toml", *SMALL], {"sources"}),
    (["data", "inspect", "first.toml", *SMALL], {"sources"}),
    (["data", "check", "first.toml", *SMALL], {"sources", "exact", "near", "against", "listed", "list"}),
    (["doctor", "first.toml", *SMALL], {"verdict", "nodes", "findings", "seconds"}),
    (["train", "first.toml", *SMALL], {"global_step", "training_loss", "model_dir"}),
    (["train", "--dry-run", "first.toml", *SMALL], {"ranks", "cost"}),
    (["launch", "slurm", "first.toml", *SMALL], {"kind", "files", "folder", "command", "placeholders", "id"}),
    (
        ["status", "first.toml", *SMALL],
        {"kind", "id", "state", "detail", "submitted", "step", "saved_step", "max_steps"},
    ),
    (["stop", "first.toml", *SMALL], {"kind", "id", "message"}),
    (["logs", "first.toml", *SMALL], {"kind", "id", "lines"}),
    (["convert", "runs/quickstart/checkpoints/step_000002", "hf", "--to", "hf", "--verify"], {"target", "verified"}),
    (["convert", "runs/quickstart", "exported"], {"target", "to", "chosen"}),
    (["generate", "hf", "--prompt", "def ", "--max-new-tokens", "2"], {"model", "settings", "replies"}),
    (["eval", "hf", "--data", "words.txt"], {"models"}),
    (["vocab", "extend", "hf", "more", "--add", "words.txt"], {"added"}),
    (["push", "hf", "org/name"], {"url"}),
    (["bench", "--quick", "--ranks", "1"], {"toml", "found"}),
]


def test_every_verb_prints_one_object(tmp_path, monkeypatch, capsys):
    verbs = next(action for action in _parser()._actions if action.choices).choices
    assert {words[0] for words, _ in COMMANDS} == set(verbs)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("unbreakable\n")
    monkeypatch.setattr("kumi.launch.slurm.run_cluster_command", lambda command, **_: "")
    job = tmp_path / "runs" / "quickstart" / "launch"
    job.mkdir(parents=True)
    (job / "launch.json").write_text('{"kind": "slurm", "id": "7", "submitted": "2026-01-01T00:00:00"}')
    (job / "slurm-7.out").write_text("trained\n")
    monkeypatch.setattr("kumi.hub.check_push", lambda name, flag: None)
    monkeypatch.setattr("kumi.hub.push", lambda folder, name, **_: f"https://hub/{name}")
    monkeypatch.setattr("kumi.bench.run_bench._measure", lambda machine, numerics, quick: (0, None))
    for words, keys in COMMANDS:
        assert main([*words, "--json"]) == 0, words
        output = capsys.readouterr()
        if words[0] == "bench":  # measuring takes minutes; tests/bench checks its output
            continue
        printed = json.loads(output.out)
        assert keys <= set(printed), (words, sorted(printed))
    assert printed["url"] == "https://hub/org/name"


def test_a_run_says_how_it_ended_and_its_lines_go_to_standard_error(tmp_path):
    """From a process: ranks and libraries write to the descriptor."""
    command = ["train", QUICKSTART, *SMALL, "cluster.devices_per_node=2", "--json"]
    code, stdout, stderr = run_forked(run_command, tmp_path, command)
    assert code == 0, stderr
    output = json.loads(stdout)
    assert (output["global_step"], output["max_steps"]) == (2, 2)
    assert (tmp_path / output["model_dir"] / "config.json").is_file()
    assert "step 2/2" in stderr
    assert "sample" in stderr


def run_command(folder, words):
    os.chdir(folder)
    raise SystemExit(main(words))


def test_an_error_prints_no_object(capsys):
    assert main(["plan", MODEL, "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "no machines are given" in output.err


@pytest.mark.parametrize("format", [True, False])
def test_descriptors_are_as_before_afterwards(format, capfd):
    before = os.fstat(1).st_ino
    with json_output(format) as write_json:
        write_json({"a": 1})
    assert os.fstat(1).st_ino == before
    assert json.loads(capfd.readouterr().out) == {"a": 1}
