"""Runs on two nodes of a real Slurm: stopped, preempted, cancelled, out of time, in arrays; and nowhere a secret."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from mini_slurm import KILL_WAIT_SECONDS, MiniSlurm

from forked import run_forked
from kumi.cli import main

SLOW_STEPS = Path(__file__).with_name("slow_steps.py")
STEPS = 30
# Variables of the test's own environment that the nodes need, too.
NEEDED = [name for name in ("PYTHONPATH", "KUMI_NUMERICS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
# Tokens of a hub, a tracker and an object store: in the user's file, and one that only the submitting shell has.
SECRETS = {name: f"c4n4ry-{name}-of-the-file" for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")}
SHELL_SECRET = "c4n4ry-of-the-shell"
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
steps = {STEPS}
out = "runs/tiny"
[log]
trackers = ["tensorboard"]
[export]
enabled = false
[launch]
kind = "slurm"
time_limit = "10m"
save_time = "2m"
cpus = 2
memory = "1 GiB"
env = {json.dumps(NEEDED)}
env_file = "secrets.env"
"""


@pytest.fixture
def folder(slurm_cluster, tmp_path, monkeypatch):
    """The working directory: a run file, and the user's file of secrets, which are nowhere else when the test ends."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    monkeypatch.setenv("HF_TOKEN", SHELL_SECRET)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    Path("secrets.env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    Path("secrets.env").chmod(0o600)
    yield tmp_path
    assert leaks(slurm_cluster, tmp_path) == []


def leaks(cluster, folder):
    """Return what has a secret in it: files of the run and of Slurm, command lines on this machine, Slurm's answers."""
    files = [file for place in (folder, cluster.folder) for file in place.rglob("*") if file.is_file()]
    files += Path("/proc").glob("[0-9]*/cmdline")
    asked = ("scontrol -dd show job", "scontrol show step", "squeue --format %all", "sinfo --format %all")
    answers = [question for question in asked if has_secret(answer(cluster, question))]
    return answers + [file for file in files if file.name != "secrets.env" and has_secret(content(file))]


def answer(cluster, question):
    """Return all that Slurm prints. It fails without an answer if it is asked for steps while none run."""
    ended = subprocess.run(question.split(), env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ended.returncode == 0 or question.endswith("show step"), (question, ended.stdout)
    return ended.stdout


def content(file):
    with suppress(OSError):  # it went in the meantime
        return file.read_bytes()
    return b""


def has_secret(content):
    return any(secret.encode() in content for secret in (SHELL_SECRET, *SECRETS.values()))


def kumi(capsys, *words):
    """Run a command of kumi and return the object that it prints."""
    code = main([*words, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert not has_secret((printed.out + printed.err).encode())
    return json.loads(printed.out)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return a function: the result of the run, with the overrides `words`, trained in one go on this machine."""
    results = {}

    def train_once(*words):
        if words not in results:
            folder = tmp_path_factory.mktemp("here")
            (folder / "run.toml").write_text(RUN)
            code, _, errors = run_forked(train_here, folder, *words, timeout=900.0)
            assert code == 0, errors
            results[words] = result(folder / "runs" / "tiny")
        return results[words]

    return train_once


def train_here(folder, *words):
    os.chdir(folder)
    raise SystemExit(main(["train", "run.toml", "cluster.nodes=1", "cluster.devices_per_node=4", *words]))


def result(out):
    """Return the losses of the run in `out`, by step, and the digests of the tensors in its last checkpoint."""
    shards = (out / "checkpoints" / f"step_{STEPS:06d}").glob("*.safetensors")
    return losses(out), {shard.name: hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards}


def losses(out):
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["train/loss"] for entry in entries if "train/loss" in entry}


def output_of(folder):
    return "\n".join(file.read_text() for file in sorted(folder.rglob("slurm-*.out")))


def wait_for_steps(cluster, number, out, steps=2):
    """Wait until the run has trained more than `steps` steps."""

    def has_steps():
        assert cluster.job(number)["JobState"] in ("PENDING", "RUNNING"), output_of(Path())
        return (out / "metrics.jsonl").exists() and len(losses(out)) > steps

    cluster.wait_for(has_steps, seconds=240)


def submit_slow(capsys, cluster, seconds, *words):
    """Write the script of run.toml, let its steps take at least `seconds`, submit it by hand; return its number."""
    kumi(capsys, "launch", "run.toml", *words, "--out", "jobs")
    script = Path("jobs", "job.sbatch")
    command, slow = f"{sys.executable} -m kumi train", f"{sys.executable} {SLOW_STEPS} {seconds} train"
    assert script.read_text().count(command) == 1
    script.write_text(script.read_text().replace(command, slow))
    return cluster.run("sbatch", "--parsable", str(script)).strip()


def restart_now(cluster, number, restarts):
    """Wait until Slurm has requeued the job `restarts` times, then start it: Slurm itself would wait two minutes."""
    cluster.wait_for(lambda: cluster.job(number)["Restarts"] == str(restarts), seconds=120)
    cluster.wait_for_state(number, "PENDING")
    time.sleep(2.5)  # a node refuses a job that begins in the second in which it was requeued
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")


def wait_for_end(cluster, number):
    """Wait until the job has ended, and return its fields. It must have succeeded."""
    ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    fields = cluster.wait_for(lambda: fields if (fields := cluster.job(number))["JobState"] in ends else None, 300)
    assert fields["JobState"] == "COMPLETED", output_of(Path())
    return fields


@pytest.mark.exhaustive
def test_a_run_on_two_nodes_is_stopped_and_goes_on_as_if_it_had_not_been(slurm_cluster, uninterrupted, folder, capsys):
    out, words = folder / "runs" / "tiny", ["train.steps=30", "export.enabled=true"]
    number = submit_slow(capsys, slurm_cluster, 0.3, *words)
    wait_for_steps(slurm_cluster, number, out)
    assert leaks(slurm_cluster, folder) == []  # while Slurm has the script and the environment of the job
    slurm_cluster.run("scancel", "--batch", "--signal=USR1", number)
    restart_now(slurm_cluster, number, 1)
    assert not (out / "stop").exists()
    wait_for_end(slurm_cluster, number)
    text = output_of(folder / "jobs")
    assert "kumi: exit code 75 after 0 restarts" in text
    assert "resumed after step" in text
    assert (out / "hf" / "README.md").is_file()
    assert result(out) == uninterrupted()


@pytest.mark.exhaustive
def test_a_submitted_run_on_two_nodes_has_the_losses_of_one_process(slurm_cluster, uninterrupted, folder, capsys):
    out = folder / "runs" / "tiny"
    launched = kumi(capsys, "launch", "run.toml", "--submit")
    assert (launched["kind"], launched["placeholders"]) == ("slurm", [])
    wait_for_end(slurm_cluster, launched["id"])
    status = kumi(capsys, "status", "run.toml")
    assert (status["state"], status["saved_step"], status["max_steps"]) == ("completed", STEPS, STEPS)
    assert sorted(losses(out)) == list(range(1, STEPS + 1))
    assert result(out) == uninterrupted()


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", ["", "SlurmctldParameters=preempt_send_user_signal\n"], ids=["TERM", "USR1"])
def test_a_preempted_run_goes_on_as_if_it_had_not_been(
    folder, slurm_cluster, uninterrupted, tmp_path_factory, monkeypatch, capsys, options
):
    """With SIGTERM to the nodes, which is usual, and with the signal of --signal to the script."""
    out = folder / "runs" / "tiny"
    with MiniSlurm(tmp_path_factory.mktemp("slurm"), options=options) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        number = submit_slow(capsys, cluster, 0.3)
        wait_for_steps(cluster, number, out)
        better = ["--partition=urgent", "--nodes=3", "--exclusive", "--mem=0", "--output=/dev/null", "--export=NONE"]
        better += ["--wrap", "true"]
        urgent = cluster.run("sbatch", "--parsable", *better).strip()
        assert cluster.wait_for_state(urgent, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
        restart_now(cluster, number, 1)
        assert leaks(cluster, folder) == []
        wait_for_end(cluster, number)
    assert f"kumi: exit code {75 if options else 143} after 0 restarts" in output_of(folder / "jobs")
    assert result(out) == uninterrupted()


@pytest.mark.exhaustive
def test_a_run_saves_before_each_time_limit_and_goes_on(slurm_cluster, uninterrupted, folder, capsys):
    """By Slurm's own clock: each job is asked to save a minute to a half before its end, at two minutes."""
    out = folder / "runs" / "tiny"
    number = submit_slow(capsys, slurm_cluster, 3.1, "launch.time_limit=2m", "launch.save_time=30s")
    restarts = 0
    while (state := slurm_cluster.job(number)["JobState"]) in ("PENDING", "RUNNING", "COMPLETING"):
        if state == "PENDING" and int(slurm_cluster.job(number)["Restarts"]) > restarts:
            restarts += 1
            restart_now(slurm_cluster, number, restarts)
        time.sleep(0.2)
    fields = wait_for_end(slurm_cluster, number)
    assert (fields["TimeLimit"], int(fields["Restarts"])) == ("00:02:00", restarts)
    assert restarts >= 1
    text = output_of(folder / "jobs")
    assert text.count("kumi: exit code 75 after ") == restarts
    assert text.count("SIGUSR1: saved after step") == restarts
    assert result(out) == uninterrupted()


@pytest.mark.exhaustive
def test_a_cancelled_run_saves_and_leaves_no_process(slurm_cluster, uninterrupted, folder, capsys):
    out = folder / "runs" / "tiny"
    number = submit_slow(capsys, slurm_cluster, 0.3)
    wait_for_steps(slurm_cluster, number, out)
    assert len(processes_of(number)) >= 8  # two nodes with an agent and two ranks each, the head, the script
    slurm_cluster.run("scancel", number)
    began = time.monotonic()
    MiniSlurm.wait_for(lambda: not processes_of(number))
    assert time.monotonic() - began < KILL_WAIT_SECONDS + 5
    fields = slurm_cluster.wait_for_state(number, "CANCELLED")
    assert fields["Restarts"] == "0"
    assert slurm_cluster.run("squeue", "--noheader", "--jobs", number) == ""
    text, last = output_of(folder / "jobs"), max(losses(out))
    assert f"SIGTERM: saved after step {last}" in text
    assert "task 0: Exited with exit code 143" in text
    assert "task 1: Exited with exit code 143" in text
    assert (out / "checkpoints" / f"step_{last:06d}" / "index.json").is_file()
    # The same command goes on.
    launched = kumi(capsys, "launch", "run.toml", "--submit")
    wait_for_end(slurm_cluster, launched["id"])
    assert result(out) == uninterrupted()


def processes_of(number):
    """The processes of the Slurm job `number` of this test."""
    marks = {f"SLURM_JOB_ID={number}".encode(), f"SLURM_CONF={os.environ['SLURM_CONF']}".encode()}
    places = Path("/proc").glob("[0-9]*/environ")
    return [place for place in places if marks <= set(content(place).split(b"\0"))]


@pytest.mark.exhaustive
def test_the_runs_of_an_array_write_to_folders_of_their_own(slurm_cluster, uninterrupted, folder, capsys):
    array = "launch.slurm.array=[['train.seed=1'], ['train.seed=2'], ['train.seed=3', 'name=third']]"
    number = kumi(capsys, "launch", "run.toml", array, "--submit")["id"]
    runs = [f"train.out=runs/tiny-{task}" for task in range(3)]
    for task, words in enumerate(runs):
        wait_for_end(slurm_cluster, f"{number}_{task}")
        status = kumi(capsys, "status", "run.toml", words)
        assert (status["id"], status["state"], status["saved_step"]) == (f"{number}_{task}", "completed", STEPS)
        assert any("finished: 30 steps" in line for line in kumi(capsys, "logs", "run.toml", words)["lines"])
    results = [result(folder / "runs" / f"tiny-{task}") for task in range(3)]
    names = [(folder / "runs" / f"tiny-{task}" / "config.toml").read_text().splitlines()[0] for task in range(3)]
    assert names == ['name = "tiny-0"', 'name = "tiny-1"', 'name = "third"']
    assert [len({json.dumps(each[part], sort_keys=True) for each in results}) for part in range(2)] == [3, 3]
    assert results[1] == uninterrupted("train.seed=2")
    assert [file.name for file in (folder / "runs" / "tiny").iterdir()] == ["launch"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("shell", ["salloc", "sbatch"])
def test_kumi_train_in_the_shell_of_a_job_trains_on_one_machine(
    slurm_cluster, uninterrupted, folder, monkeypatch, shell
):
    monkeypatch.delenv("HF_TOKEN")  # sbatch without --export, unlike that of kumi, would give it to Slurm
    here = ["cluster.nodes=1", "cluster.devices_per_node=4"]
    words = ["--nodes=1", "--cpus-per-task=4", "--mem=2G", "--quiet"]
    command = [sys.executable, "-m", "kumi", "train", "run.toml", *here]
    if shell == "salloc":
        slurm_cluster.run("salloc", *words, *command)
    else:
        slurm_cluster.run("sbatch", *words, "--wait", "--output=/dev/null", "--wrap", " ".join(command))
    assert result(folder / "runs" / "tiny") == uninterrupted()


@pytest.mark.exhaustive
def test_a_run_on_two_nodes_saves_and_ends_when_asked(slurm_cluster, folder, capsys):
    """A chain of jobs; the name and the folder of the run would be commands of a shell and options of Slurm."""
    name = 'it\'s "$(touch pwned)" `touch pwned` %j --x'
    out, words = folder / "runs" / name, ["train.steps=100000", "launch.slurm.chain=3"]
    words += [f"name={json.dumps(name)}", f"train.out={json.dumps(f'runs/{name}')}"]
    number = kumi(capsys, "launch", "slurm", "run.toml", *words, "--submit")["id"]
    wait_for_steps(slurm_cluster, number, out)
    assert leaks(slurm_cluster, folder) == []  # while Slurm has the script and the environment of the job
    assert "saves after its current step" in kumi(capsys, "stop", "run.toml", *words)["message"]
    slurm_cluster.wait_for(lambda: not slurm_cluster.run("squeue", "--noheader", "--jobs", number).strip(), 120)
    assert kumi(capsys, "status", "run.toml", *words)["saved_step"] == max(losses(out))
    text = "\n".join(kumi(capsys, "logs", "run.toml", *words, "--lines", "200")["lines"])
    assert "kumi: exit code 75" in text
    assert "\x1b" not in text
    assert list((out / "launch").glob("*_2.out")) == []
    assert f"JobName={name}\n" in slurm_cluster.run("scontrol", "show", "job", number)
    assert list(folder.rglob("pwned")) == []
