"""`kumi launch slurm --submit` trains on two nodes of a real Slurm, is stopped by a signal, requeued, and goes on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from forked import run_forked
from kumi.cli import main

# Variables of the test's own environment that the nodes need, too.
NEEDED = [name for name in ("PYTHONPATH", "KUMI_NUMERICS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
RUN = f"""
name = "tiny"
[model]
init = "random"
config = {{ model_type = "llama", architectures = ["LlamaForCausalLM"], vocab_size = 300, hidden_size = 32, \
intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 2, \
max_position_embeddings = 64, rms_norm_eps = 1e-5, tie_word_embeddings = true }}
[cluster]
nodes = 2
devices_per_node = 2
[batch]
seq_len = 64
tokens_per_step = 512
[layout]
dp_shard = 4
zero = 3
microbatch = 1
[data]
tokenizer = {{ vocab_size = 300 }}
sources = [{{ path = "{{stdlib}}/json/*.py" }}]
validation = 0
workers = 1
[train]
steps = 100
out = "runs/tiny"
[export]
enabled = false
[launch]
kind = "slurm"
time_limit = "10m"
save_time = "2m"
cpus = 2
memory = "2 GiB"
env = {json.dumps(NEEDED)}
"""


def kumi(capsys, *words):
    """Run a command of kumi and return the object that it prints."""
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def train_here(folder):
    os.chdir(folder)
    words = ["cluster.nodes=1", "cluster.devices_per_node=4", "train.out=runs/here"]
    raise SystemExit(main(["train", "run.toml", *words]))


def losses(out):
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["train/loss"] for entry in entries if "train/loss" in entry}


def wait_for_steps(cluster, number, out):
    """Wait until the run has trained more than two steps."""

    def has_steps():
        assert cluster.job(number)["JobState"] in ("PENDING", "RUNNING"), [
            file.read_text() for file in out.rglob("*.out")
        ]
        return (out / "metrics.jsonl").exists() and len(losses(out)) > 2

    cluster.wait_for(has_steps, seconds=240)


@pytest.mark.exhaustive
def test_a_run_on_two_nodes_is_stopped_and_goes_on_as_if_it_had_not_been(slurm_cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    out = tmp_path / "runs" / "tiny"
    launched = kumi(capsys, "launch", "run.toml", "--submit")
    assert (launched["kind"], launched["placeholders"]) == ("slurm", [])
    number = launched["id"]
    wait_for_steps(slurm_cluster, number, out)
    slurm_cluster.run("scancel", "--batch", "--signal=USR1", number)
    slurm_cluster.wait_for(lambda: slurm_cluster.job(number)["Restarts"] == "1", seconds=120)
    status = kumi(capsys, "status", "run.toml")
    assert (status["id"], status["state"]) == (number, "pending")
    assert 2 < status["saved_step"] == status["step"] < status["max_steps"] == 100
    assert not (out / "stop").exists()
    time.sleep(2.5)  # a node refuses a job that begins in the second in which it was requeued
    slurm_cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    fields = slurm_cluster.wait_for(
        lambda: fields if (fields := slurm_cluster.job(number))["JobState"] in ("COMPLETED", "FAILED") else None, 240
    )
    assert fields["JobState"] == "COMPLETED", "\n".join(kumi(capsys, "logs", "run.toml")["lines"])
    assert kumi(capsys, "status", "run.toml")["saved_step"] == 100
    code, _, errors = run_forked(train_here, tmp_path)
    assert code == 0, errors
    assert losses(out) == losses(tmp_path / "runs" / "here")
    assert sorted(losses(out)) == list(range(1, 101))


def test_a_run_on_two_nodes_saves_and_ends_when_asked(slurm_cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    out = tmp_path / "runs" / "tiny"
    words = ["train.steps=100000", "launch.slurm.chain=3"]
    number = kumi(capsys, "launch", "slurm", "run.toml", *words, "--submit")["id"]
    wait_for_steps(slurm_cluster, number, out)
    assert "saves after its current step" in kumi(capsys, "stop", "run.toml", *words)["message"]
    slurm_cluster.wait_for(lambda: not slurm_cluster.run("squeue", "--noheader", "--jobs", number).strip(), 120)
    assert kumi(capsys, "status", "run.toml", *words)["saved_step"] == max(losses(out))
    text = "\n".join(kumi(capsys, "logs", "run.toml", *words, "--lines", "200")["lines"])
    assert "kumi: exit code 75" in text
    assert "\x1b" not in text
    assert list((out / "launch").glob("*_2.out")) == []
