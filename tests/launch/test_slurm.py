"""The batch script on a real Slurm: it starts a node each, saves before a time limit, goes on, and ends when asked."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launch_jobs import HOSTILE, job_with

from kumi.errors import ConfigError
from kumi.launch import slurm
from kumi.launch.cluster_launchers import request_stop, submit_job, write_launch_file
from kumi.launch.launch_record import LaunchRecord

STAND_IN = Path(__file__).parent / "stand_in_node.py"
LAUNCH = {"cpus": 1, "memory": "100 MiB", "time_limit": "10m", "save_time": "2m"}
CANARY = "c4n4ry-of-a-secret"


@pytest.fixture
def submitted(slurm_cluster, tmp_path, monkeypatch):
    """Return a function that submits a job whose nodes end with `codes`, and returns the job and its record."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))

    def submit(codes, launch=None, name="tiny", **fields):
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        out = tmp_path / "runs" / fields.pop("run", "tiny")
        (tmp_path / "out").write_text(str(out))
        program = (sys.executable, str(STAND_IN), str(tmp_path))
        usual = {"nodes": 2, "device_kind": "cpu", "device": "a CPU", "folder": str(tmp_path)}
        job = job_with(LAUNCH | (launch or {}), name=name, out=str(out), program=program, files=str(out / "launch"))
        job = replace(job, **(usual | fields))
        file = write_launch_file(slurm, job, Path(job.files), replace=True)
        return job, submit_job(slurm, job, file)

    return submit


def seen(folder, node, start=0):
    return json.loads((folder / f"node-{node}-{start}.json").read_text())


def start_again(cluster, record, restarts=1):
    """Start the job now that was requeued `restarts` times: Slurm itself would wait for two minutes."""
    cluster.wait_for(lambda: cluster.job(record.id)["Restarts"] == str(restarts))
    cluster.wait_for_state(record.id, "PENDING")
    time.sleep(2.5)  # a node refuses a job that begins in the second in which it was requeued
    cluster.run("scontrol", "update", f"JobId={record.id}", "StartTime=now")


def preempt(cluster, nodes):
    """Submit a job of a better partition that needs all CPUs of `nodes` nodes for a moment; return its number."""
    words = ["--partition=urgent", f"--nodes={nodes}", "--exclusive", "--mem=0", "--output=/dev/null"]
    return cluster.run("sbatch", "--parsable", *words, "--wrap", "true").strip()


def test_each_node_learns_its_place_and_gets_named_variables_only(submitted, slurm_cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("NAMED", "yes; $(touch pwned)")
    monkeypatch.setenv("UNNAMED", "no")
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"# tokens\nHF_TOKEN={CANARY} $(touch pwned)\n\nWANDB_API_KEY='{CANARY}'")
    secrets.chmod(0o600)
    launch = {"env": ["NAMED"], "env_file": str(secrets), "setup": ["export FROM_SETUP=1", "echo set up"]}
    job, record = submitted([0], launch)
    fields = slurm_cluster.wait_for_state(record.id, "COMPLETED", "FAILED")
    assert fields["ExitCode"] == "0:0"
    places = [seen(tmp_path, node)["environment"] for node in range(2)]
    assert [place["KUMI_NODE"] for place in places] == ["0", "1"]
    assert {place["KUMI_NODES"] for place in places} == {"2"}
    assert len({place["KUMI_HEAD"] for place in places}) == 1
    assert places[0]["KUMI_HEAD"].startswith("127.0.0.1:")
    assert {place["SLURMD_NODENAME"] for place in places} == {"n0", "n1"}
    for place in places:
        assert (place["NAMED"], place["FROM_SETUP"]) == ("yes; $(touch pwned)", "1")
        assert "UNNAMED" not in place
        # A value is everything behind the equals sign: the shell neither runs nor unquotes it.
        assert (place["HF_TOKEN"], place["WANDB_API_KEY"]) == (f"{CANARY} $(touch pwned)", f"'{CANARY}'")
    assert seen(tmp_path, 1)["words"] == ["train", "run.toml", "optim.lr=2e-5"]
    assert seen(tmp_path, 1)["folder"] == str(tmp_path)
    written = [file for file in Path(job.out).rglob("*") if file.is_file()]
    assert {file.name for file in written} == {"job.sbatch", "launch.json", f"slurm-{record.id}.out"}
    slurm_files = [file for file in slurm_cluster.folder.rglob("*") if file.is_file()]
    assert [file for file in written + slurm_files if CANARY.encode() in file.read_bytes()] == []
    assert CANARY not in slurm_cluster.run("scontrol", "show", "job", record.id)
    assert not (tmp_path / "pwned").exists()


def test_a_signal_saves_and_the_job_goes_on_in_the_same_log(submitted, slurm_cluster, tmp_path):
    job, record = submitted(["", "0"])
    slurm_cluster.wait_for(lambda: (tmp_path / "node-1-0.json").exists() and (tmp_path / "node-0-0.json").exists())
    slurm_cluster.run("scancel", "--batch", "--signal=USR1", record.id)  # as Slurm does before a time limit
    start_again(slurm_cluster, record)
    assert slurm_cluster.wait_for_state(record.id, "COMPLETED", "FAILED")["Restarts"] == "1"
    log = (Path(job.files) / f"slurm-{record.id}.out").read_text()
    assert log.count("saved USR1") == 2
    assert "exit code 75 after 0 restarts" in log
    assert "exit code 0 after 1 restarts" in log
    assert not (Path(job.out) / "stop").exists()
    assert slurm.state(record).word == "completed"
    assert "restarted 1 times, exit code 0" in slurm.state(record).detail


def test_a_job_that_a_better_one_preempts_saves_and_starts_again(submitted, slurm_cluster, tmp_path):
    job, record = submitted(["", "0"], {"cpus": 4}, nodes=3)
    slurm_cluster.wait_for(lambda: all((tmp_path / f"node-{node}-0.json").exists() for node in range(3)))
    better = preempt(slurm_cluster, 3)
    assert slurm_cluster.wait_for_state(better, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    start_again(slurm_cluster, record)
    assert slurm_cluster.wait_for_state(record.id, "COMPLETED", "FAILED")["Restarts"] == "1"
    log = (Path(job.files) / f"slurm-{record.id}.out").read_text()
    assert log.count("saved TERM") == 3
    assert "exit code 143 after 0 restarts" in log
    assert "exit code 0 after 1 restarts" in log


def test_a_job_is_started_again_at_most_so_often(submitted, slurm_cluster):
    _, record = submitted([7, 7, 0], {"requeues": 1})
    start_again(slurm_cluster, record)
    fields = slurm_cluster.wait_for_state(record.id, "COMPLETED", "FAILED")
    assert (fields["Restarts"], fields["ExitCode"]) == ("1", "7:0")


@pytest.mark.parametrize("code", [2, 6])
def test_a_hopeless_job_is_not_started_again(submitted, slurm_cluster, code):
    _, record = submitted([code, 0])
    fields = slurm_cluster.wait_for_state(record.id, "COMPLETED", "FAILED")
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", f"{code}:0", "0")


def test_a_stopped_job_saves_and_is_not_started_again(submitted, slurm_cluster, tmp_path):
    job, record = submitted(["", "0"])
    slurm_cluster.wait_for(lambda: (tmp_path / "node-1-0.json").exists())
    assert slurm.state(record).word == "running"
    assert "saves after its current step" in slurm.stop(record, Path(job.out), now=False)
    request_stop(Path(job.out))
    fields = slurm_cluster.wait_for_state(record.id, "FAILED", "COMPLETED")
    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("FAILED", "75:0", "0")
    assert "saved stop" in (Path(job.files) / f"slurm-{record.id}.out").read_text()


def test_a_job_that_is_cancelled_or_waits_ends_at_once(submitted, slurm_cluster, tmp_path):
    job, record = submitted([""], {"cpus": 4})
    _, waiting = submitted([""], {"cpus": 4}, run="other", nodes=3, name="other")
    slurm_cluster.wait_for(lambda: (tmp_path / "node-1-0.json").exists())
    assert "will not start again" in slurm.stop(waiting, Path(job.out), now=False)
    assert slurm_cluster.wait_for_state(waiting.id, "CANCELLED")
    assert "the last checkpoint stays" in slurm.stop(record, Path(job.out), now=True)
    assert slurm_cluster.wait_for_state(record.id, "CANCELLED")


def test_a_chain_continues_until_the_run_is_done(submitted, slurm_cluster, tmp_path):
    # The tasks of an array are jobs of their own, none of them restarted, so each reads the first line of `codes`.
    job, record = submitted([""], {"slurm": {"chain": 3}})
    slurm_cluster.wait_for(lambda: (tmp_path / "node-1-0.json").exists() and (tmp_path / "node-0-0.json").exists())
    (tmp_path / "codes").write_text("0\n")
    request_stop(Path(job.out))
    slurm_cluster.wait_for(lambda: not slurm_cluster.run("squeue", "--noheader", "--jobs", record.id).strip())
    logs = [Path(job.files) / f"slurm-{record.id}_{task}.out" for task in (1, 2, 3)]
    assert "exit code 75" in logs[0].read_text()
    assert "exit code 0" in logs[1].read_text()
    assert not logs[2].exists()
    assert slurm.log_command(record, 5, follow=True) == ("tail", "-n", "5", "--follow", "--", str(logs[1]))


# Prints its words; the last run of an array asks to be started again, once. Its job has the number of the array.
PRINTS = """
import os, sys
print("node", os.environ["KUMI_NODE"], sys.argv[1:], flush=True)
sys.exit(75 if "SLURM_RESTART_COUNT" not in os.environ and "train.seed=3" in sys.argv else 0)
"""


def test_the_runs_of_an_array_have_names_folders_and_restarts_of_their_own(submitted, slurm_cluster, tmp_path):
    def run(number, seed):
        words, out = (f"train.seed={seed}", f'name="it\'s {number}"'), tmp_path / "runs" / f"it's {number}"
        return replace(job_with(name=f"it's {number}", out=str(out), files=str(out / "launch")), overrides=words)

    runs = tuple(replace(each, program=(sys.executable, "-c", PRINTS)) for each in (run(0, 1), run(1, 2), run(2, 3)))
    job, record = submitted([0], array=runs)
    tasks = [LaunchRecord("slurm", f"{record.id}_{number}", tmp_path, "", job.files) for number in range(3)]
    slurm_cluster.wait_for(lambda: slurm_cluster.job(tasks[2].id)["Restarts"] == "1")
    start_again(slurm_cluster, tasks[2])
    for number, task in enumerate(tasks):
        fields = slurm_cluster.wait_for_state(task.id, "COMPLETED", "FAILED")
        assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1" if number == 2 else "0")
        assert f"JobName=it's {number}\n" in slurm_cluster.run("scontrol", "show", "job", task.id)
        command = slurm.log_command(task, 50, follow=False)
        assert command[-1] == str(Path(job.files) / f"slurm-{record.id}_{number}.out")
        lines = Path(command[-1]).read_text().splitlines()
        words = ["train", "run.toml", f"train.seed={number + 1}", f'name="it\'s {number}"']
        assert {f"node {node} {words}" for node in range(2)} <= set(lines)
        assert len([line for line in lines if line.startswith("node 0 ")]) == (2 if number == 2 else 1)
        assert (tmp_path / "runs" / f"it's {number}").is_dir()
        assert slurm.state(task).word == "completed"


@pytest.mark.parametrize("option", ["--array=0-2", "-a 0-2", "-a0-2%1", "--nice=1 --array 1-3"])
def test_an_array_of_one_folder_is_refused(option):
    with pytest.raises(ConfigError, match=r"extra has --array, whose tasks would all write to one run folder; .*chain"):
        slurm.check(job_with({"slurm": {"extra": [option]}}), submit=False)
    slurm.check(job_with({"slurm": {"extra": ["--account=x", "-A x"]}}), submit=False)
    with pytest.raises(ConfigError, match=r"launch.slurm.array and launch.slurm.chain both need"):
        slurm.check(job_with({"slurm": {"array": [["a.b=c"]], "chain": 2}}), submit=False)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_names_and_paths_are_taken_as_they_are(submitted, slurm_cluster, tmp_path, text):
    folder = tmp_path / text
    folder.mkdir()
    run_file = f"{text}.toml"
    job, record = submitted(
        [0], run=text, name=text, folder=str(folder), run_file=run_file, overrides=(f"name={text}",)
    )
    slurm_cluster.wait_for_state(record.id, "COMPLETED", "FAILED")
    # By its lines, because Slurm's own output has no quotes.
    shown = slurm_cluster.run("scontrol", "show", "job", record.id).splitlines()
    assert shown[0] == f"JobId={record.id} JobName={text}"
    assert seen(tmp_path, 1)["folder"] == str(folder)
    given = f"./{run_file}" if run_file.startswith("-") else run_file
    assert seen(tmp_path, 1)["words"] == ["train", given, f"name={text}"]
    assert (Path(job.files) / f"slurm-{record.id}.out").exists()
    assert list(tmp_path.rglob("pwned")) == []
    assert list(Path.cwd().glob("pwned")) == []


def test_a_name_may_have_a_backslash_but_slurm_writes_no_output_below_one(submitted, slurm_cluster, tmp_path):
    _, record = submitted([0], name="a\\b\\", overrides=("name=a\\b\\",))
    slurm_cluster.wait_for_state(record.id, "COMPLETED")
    assert "JobName=a\\b\\\n" in slurm_cluster.run("scontrol", "show", "job", record.id)
    assert seen(tmp_path, 1)["words"][-1] == "name=a\\b\\"
    with pytest.raises(ConfigError, match=r"has a backslash, and Slurm then replaces no %j in the name of its output"):
        submitted([0], run="a\\b")


def test_extra_options_reach_slurm_as_they_are(submitted, slurm_cluster, tmp_path):
    comment = "$(touch pwned) `touch pwned`; touch pwned # '${HOME}' --wrap=x 模型"
    _, record = submitted([0], {"slurm": {"extra": [f'--comment="{comment}"', "--nice=7 --no-kill"]}})
    slurm_cluster.wait_for_state(record.id, "COMPLETED")
    shown = [line.strip() for line in slurm_cluster.run("scontrol", "show", "job", record.id).splitlines()]
    assert f"Comment={comment}" in [line.removesuffix(" ") for line in shown]
    assert any("Nice=7 " in line for line in shown)
    assert list(tmp_path.rglob("pwned")) == []
    assert list(Path.cwd().glob("pwned")) == []


def test_secrets_that_others_may_read_are_refused_here_and_on_the_node(submitted, slurm_cluster, tmp_path, monkeypatch):
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"HF_TOKEN={CANARY}\n")
    secrets.chmod(0o644)
    with pytest.raises(ConfigError, match=r"secrets.env has mode 644, .*; chmod 600 "):
        submitted([0], {"env_file": str(secrets)})
    monkeypatch.setattr(slurm, "check", lambda job, submit: None)
    job, record = submitted([0], {"env_file": str(secrets)})
    assert slurm_cluster.wait_for_state(record.id, "FAILED")["ExitCode"] == "2:0"
    assert "has mode 644; chmod 600 it" in (Path(job.files) / f"slurm-{record.id}.out").read_text()


def test_a_broken_line_of_secrets_is_named_by_number_only(submitted, slurm_cluster, tmp_path):
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"HF_TOKEN=x\nHF TOKEN={CANARY}\n")
    secrets.chmod(0o600)
    job, record = submitted([0], {"env_file": str(secrets)})
    assert slurm_cluster.wait_for_state(record.id, "FAILED")["ExitCode"] == "2:0"
    log = (Path(job.files) / f"slurm-{record.id}.out").read_text()
    assert "line 2 is not NAME=value" in log
    assert CANARY not in log


def test_a_variable_that_is_not_set_is_refused_before_the_queue(submitted, monkeypatch):
    monkeypatch.delenv("NAMED", raising=False)
    with pytest.raises(ConfigError, match=r"launch.env names NAMED, which this shell does not set"):
        submitted([0], {"env": ["NAMED"]})


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PASSWORD"]
)
def test_a_secret_is_not_given_to_slurm(monkeypatch, name):
    monkeypatch.setenv(name, CANARY)
    job = job_with({"env": ["TOKENIZERS_PARALLELISM", name]})
    with pytest.raises(
        ConfigError, match=rf"launch.env names {name}, and Slurm would store the value .* launch.env_file"
    ):
        slurm.check(job, submit=False)
    slurm.check(job_with({"env": ["TOKENIZERS_PARALLELISM"]}), submit=False)


def test_what_slurm_refuses_is_one_sentence(submitted):
    with pytest.raises(ConfigError, match=r"sbatch --parsable failed: .*partition.*; correct the section \[launch\]"):
        submitted([0], {"slurm": {"partition": "none-such"}})


def test_a_forgotten_job_is_unknown(submitted, slurm_cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    assert slurm.state(LaunchRecord("slurm", "999999", Path("x"), "")).word == "unknown"


PLACE = "import os; from kumi.launch.standing import find_standing; print(find_standing(os.environ))"


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_shell_of_a_job_is_one_machine_and_a_step_is_its_nodes(slurm_cluster, tmp_path, nodes):
    """As kumi finds its place in the shell of salloc, in a batch script, and in the steps of srun in them."""
    size = (f"--nodes={nodes}", "--cpus-per-task=1", "--mem=100M", "--quiet")
    ask = (sys.executable, "-c", PLACE)
    assert slurm_cluster.run("salloc", *size, *ask) == "None\n"
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(f"#!/bin/bash\n{shlex.join(ask)}\nsrun --ntasks=1 --nodes=1 {shlex.join(ask)}\n")
    slurm_cluster.run("sbatch", *size, "--wait", f"--output={output}", str(script))
    assert output.read_text() == "None\nNone\n"
    places = slurm_cluster.run("salloc", *size, "srun", "--ntasks-per-node=1", *ask).splitlines()
    if nodes == 1:
        assert places == ["None"]
        return
    head = re.search(r"HeadAddress\(host='127.0.0.1', port=2\d{4}\)", places[0])[0]
    source = "local_ranks=None, source='srun, one task a node')"
    assert sorted(places) == [f"Standing(node={node}, nodes=2, head={head}, {source}" for node in range(2)]
