"""The runs of launch.slurm.array: names, folders and overrides of each, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kumi.cli import main
from kumi.errors import ConfigError
from kumi.launch.job_array import array_runs

RUN = """
name = {name}
model = {{ init = "random", config = {{}} }}
cluster = {{ source = "h100-sxm", nodes = 2, network = "ib-ndr" }}
batch = {{ seq_len = 8, tokens_per_step = 128 }}
data = {{ sources = [{{ path = "x" }}], tokenizer = "t" }}
train = {{ steps = 1, out = {out} }}
launch = {{ kind = "slurm", slurm = {{ array = {array} }} }}
"""


def runs(tmp_path, array, name="tiny", out="runs/tiny", overrides=()):
    words = {"name": json.dumps(name), "out": json.dumps(out), "array": json.dumps(array)}
    (tmp_path / "run.toml").write_text(RUN.format(**words))
    return array_runs(str(tmp_path / "run.toml"), overrides)


def test_each_run_has_a_name_and_a_folder_of_its_own(tmp_path):
    array = [["train.seed=1"], ["train.seed=2", "name=second"], ["train.out=elsewhere"]]
    configs, words = zip(*runs(tmp_path, array, overrides=["train.steps=7"]), strict=True)
    assert [config.name for config in configs] == ["tiny-0", "second", "tiny-2"]
    assert [config.train.out for config in configs] == ["runs/tiny-0", "runs/tiny-1", "elsewhere"]
    assert [config.train.seed for config in configs] == [1, 2, 0]
    assert {config.train.steps for config in configs} == {7}
    assert words[0] == ("train.steps=7", "train.seed=1", 'name="tiny-0"', 'train.out="runs/tiny-0"')
    assert runs(tmp_path, []) == []


# The last two would be a date and a table of TOML.
@pytest.mark.parametrize("text", ["it's \"so\" 'x", "$(touch x)", "a\\b", "模型", "2026-01-0", "{a"])
def test_any_text_is_a_name(tmp_path, text):
    configs = [config for config, _ in runs(tmp_path, [["train.seed=1"], ["train.seed=2"]], text, f"runs/{text}")]
    assert [config.name for config in configs] == [f"{text}-0", f"{text}-1"]
    assert [config.train.out for config in configs] == [f"runs/{text}-0", f"runs/{text}-1"]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ([["train.out=a"], ["train.out=./a"]], r"array.1: train.out=.*a is also the folder of run 0"),
        ([["train.seed=1"], ["train.out=runs/tiny-0"]], r"array.1: train.out=runs/tiny-0 is also the folder of run 0"),
        ([["cluster.nodes=4"]], r"array.0: it changes \[launch\] or \[cluster\], which all runs of a job share"),
        ([["launch.cpus=4"]], r"array.0: it changes \[launch\]"),
        ([["train.sed=1"]], r"array.0: train.sed: unknown key; did you mean 'seed'"),
        ([["seed"]], r"array.0: 'seed' is not an override"),
        ([["a\nb"]], r"launch.slurm.array.0.0: must be one line of text"),
    ],
)
def test_runs_that_could_not_be_are_refused(tmp_path, array, words):
    with pytest.raises(ConfigError, match=words):
        runs(tmp_path, array)


def test_a_verb_wants_one_run_of_the_array(tmp_path, monkeypatch, capsys):
    runs(tmp_path, [["train.seed=1"]])
    monkeypatch.chdir(tmp_path)
    assert main(["status", "run.toml"]) == 2
    assert "the runs of launch.slurm.array are in folders of their own" in capsys.readouterr().err
    folder = Path("runs/tiny-0/launch")
    folder.mkdir(parents=True)
    record = {"kind": "slurm", "id": "7_0", "submitted": "2026-01-01T00:00:00", "output": str(tmp_path)}
    (folder / "launch.json").write_text(json.dumps(record))
    (tmp_path / "slurm-7_0.out").write_text("trained\n")
    (tmp_path / "slurm-7_01.out").write_text("another\n")
    assert main(["logs", "run.toml", "train.out=runs/tiny-0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == ["trained"]
