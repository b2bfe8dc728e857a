"""Tasks of SkyPilot: read by SkyPilot itself, and run as processes with the variables that SkyPilot sets."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from canaries import CANARIES, canaries_in, check_used, command_lines, exports, files_with_canaries, services
from launch_jobs import HOSTILE, TEXTS, in_container
from provide_skypilot import PYTHON
from tests.train.conftest import losses, run_file

from forked import run_forked
from kumi.cli import main
from kumi.errors import ConfigError
from kumi.launch import skypilot
from namespaces import two_namespaces

READER = Path(__file__).parent / "read_tasks.py"
STAND_IN = Path(__file__).parent / "stand_in_node.py"
SOURCE = str(Path(__file__).parents[2] / "src")
MOUNTS = {"/runs": "s3://bucket/runs"}


# SkyPilot's own parser


def read_by_skypilot(texts, secrets=()):
    """What SkyPilot reads from each of `texts`, given `secrets` as the command line gives them."""
    if not PYTHON.exists():
        pytest.skip("SkyPilot's requirements contradict kumi's: `make skypilot` installs it beside kumi (459 MB)")
    requests = [{"text": text, "secrets": [list(secret) for secret in secrets]} for text in texts]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [str(PYTHON), str(READER)]
    ended = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


DEVICES = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "AMD Instinct MI300X", "a device nobody knows"]
SECTIONS = [
    {"mounts": MOUNTS},
    {"mounts": {"/runs": "gs://bucket", "/data": "corpora"}, "spot": True, "infra": "aws/us-east-1"},
    {"mounts": MOUNTS, "infra": "kubernetes", "accelerators": "H200", "image": "docker:org/kumi:1"},
]
LAUNCHES = [
    {},
    {"env": ["HF_TOKEN", "WANDB_API_KEY"], "env_file": "~/.secrets.env", "time_limit": "24h"},
    {"cpus": 32, "memory": "200.5 GiB", "setup": ["source ~/venv/bin/activate", "export A='b c' # d"], "requeues": 0},
]
NAMES = ["tiny", "a b", "it's \"so\" $(touch pwned)", "--yes", "模型: é", "# no comment", "x" * 100]


def jobs(folder):
    """Jobs with all combinations of the above, with and without GPUs."""
    for number, (device, section, launch) in enumerate(itertools.product(DEVICES, SECTIONS, LAUNCHES)):
        name = NAMES[number % len(NAMES)]
        kind = "cpu" if number % 5 == 4 else "cuda"
        job = in_container({**launch, "skypilot": section})
        yield replace(job, name=name, device=device, device_kind=kind, folder=folder, overrides=(f"name={name}",))


@pytest.mark.exhaustive
def test_skypilot_reads_every_task_as_kumi_means_it(tmp_path):
    all_jobs = [*jobs(str(tmp_path)), replace(TEXTS["task.yaml"][1], folder=str(tmp_path))]
    secrets = [(name, f"of {name}") for name in ("HF_TOKEN", "WANDB_API_KEY")]
    for given in ([], secrets):
        # SkyPilot accepts no secret that the task does not name.
        chosen = [job for job in all_jobs if len(job.launch.env) == len(given)]
        assert chosen
        for job, task in zip(chosen, read_by_skypilot([skypilot.text(job) for job in chosen], given)):
            assert "refused" not in task, (job, task)
            described = yaml.safe_load(skypilot.text(job))
            assert (task["name"], task["nodes"], task["workdir"]) == (job.host_name, 4, str(tmp_path))
            assert (task["run"], task["setup"]) == (described["run"], described["setup"])


# Machines as processes


KUMI = f'exec "{sys.executable}" -m kumi "$@"'


class Machine:
    """A machine of a task: a home with the copied working directory, in a network namespace if one is given.

    `kumi`: what the program kumi is there, as a line of a shell.
    """

    def __init__(self, folder, task, rank, addresses, namespace, kumi):
        self.folder, self.task, self.rank = folder, task, rank
        self.prefix = [] if namespace is None else ["ip", "netns", "exec", namespace]
        shutil.copytree(task["workdir"], folder / "sky_workdir")
        program = folder / "bin" / "kumi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{kumi}\n")
        program.chmod(0o755)
        (folder / "tmp").mkdir()
        gpus = str((task["resources"].get("accelerators") or ":0").partition(":")[2])
        self.environment = {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": SOURCE,
            "KUMI_NUMERICS": "reference",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "SKYPILOT_TASK_ID": f"sky-managed-2026-11-26-10-00-00-000000_{task['name']}_1-0",
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
            "SKYPILOT_NODE_IPS": "\n".join(addresses),
            "SKYPILOT_NODE_RANK": str(rank),
        }

    def start(self, section, secrets):
        """Start the script `section`, setup or run, as SkyPilot does: a file of the home, in the working directory."""
        script, log = self.folder / f"{section}.sh", open(self.folder / f"{section}.log", "wb")
        script.write_text(f"#!/bin/bash\ncd ~/sky_workdir\n{self.task[section]}")
        environment = {**self.environment, **secrets}
        with log:
            return subprocess.Popen(
                [*self.prefix, "bash", script], env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )

    def text(self, section="run"):
        return (self.folder / f"{section}.log").read_text()


def run_task(text, folder, addresses, namespaces=(None, None), secrets=None, kumi=KUMI):
    """Run the task `text` on machines with `addresses` to its end; return the machines and their exit codes.

    `secrets`: variables that SkyPilot sets from its own command line.
    """
    task = yaml.safe_load(text)
    machines = [
        Machine(folder / f"machine{rank}", task, rank, addresses, namespace, kumi)
        for rank, namespace in enumerate(namespaces)
    ]
    for section in ("setup", "run"):
        processes = [machine.start(section, secrets or {}) for machine in machines]
        try:
            codes = [process.wait(400) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            break
    return machines, codes


def launched_text(capsys, *words):
    """The task that `kumi launch skypilot run.toml` prints."""
    assert main(["launch", "skypilot", "run.toml", *words]) == 0
    return capsys.readouterr().out


def train_here(folder):
    os.chdir(folder)
    words = ["cluster.nodes=1", "cluster.devices_per_node=4", f"train.out={folder}/here"]
    raise SystemExit(main(["train", "run.toml", *words]))


def write_run(small, tmp_path, **changes):
    """Write a run on two machines of two ranks into the folder `work`, with its data; return the mounted folder."""
    work, bucket = tmp_path / "work", tmp_path / "bucket"
    work.mkdir()
    bucket.mkdir()
    shutil.copy(small.folder / "documents.jsonl", work)
    launch = {"skypilot": {"mounts": {str(bucket): "s3://bucket/runs"}}} | changes.pop("launch", {})
    usual = {
        "cluster": {"nodes": 2, "devices_per_node": 2},
        "layout": {"dp_shard": 4},
        "train__out": str(bucket / "run"),
    }
    run_file(work, launch=launch, **(usual | changes))
    return bucket


@pytest.mark.exhaustive
def test_two_machines_of_skypilot_train_as_one(small, tmp_path, monkeypatch, capsys):
    bucket = write_run(small, tmp_path)
    monkeypatch.chdir(tmp_path / "work")
    text = launched_text(capsys)
    addresses = ("10.66.2.1", "10.66.2.2")
    with two_namespaces(addresses) as names:
        machines, codes = run_task(text, tmp_path, addresses, names)
    assert codes == [0, 0], [machine.text() for machine in machines]
    assert "step 6/6" in machines[0].text()
    code, _, errors = run_forked(train_here, tmp_path / "work")
    assert code == 0, errors
    assert losses(bucket / "run") == losses(tmp_path / "work" / "here")
    assert (bucket / "run" / "hf" / "model.safetensors").exists()


SKY = """#!/bin/sh
# Stands for SkyPilot's program: keeps what it is given.
printf '%s\\n' "$@" > {folder}/words
"""


@pytest.mark.exhaustive
def test_secrets_are_in_no_output_and_no_file_but_the_users(small, tmp_path, monkeypatch, capfd):
    """Two come from the shell that submits, two from a file: SkyPilot sets all as variables on the machines."""
    named, secrets = ("HF_TOKEN", "WANDB_API_KEY"), tmp_path / "secrets.env"
    secrets.touch(mode=0o600)
    secrets.write_text("".join(f"{name}={value}\n" for name, value in CANARIES.items() if name not in named))
    for name in named:
        monkeypatch.setenv(name, CANARIES[name])
    sky = tmp_path / "programs" / "sky"
    sky.parent.mkdir()
    sky.write_text(SKY.format(folder=sky.parent))
    sky.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sky.parent}:{os.environ['PATH']}")
    addresses = ("10.66.3.1", "10.66.3.2")
    with two_namespaces(addresses) as names, command_lines() as lines:
        with services(tmp_path, small.folder / "run" / "hf", addresses[0], names[0]) as used:
            shared = {**used.environment, "KUMI_CACHE": str(tmp_path / "bucket" / "stores")}
            launch = {"env": list(named), "env_file": str(secrets), "setup": exports(shared)}
            monkeypatch.setenv("KUMI_CACHE", shared["KUMI_CACHE"])
            write_run(small, tmp_path, launch=launch, train__doctor=True, **(used.keys | {"train__out": "s3://runs/x"}))
            monkeypatch.chdir(tmp_path / "work")
            assert main(["launch", "skypilot", "run.toml", "--unchecked", "--submit"]) == 0
            (file,) = (tmp_path / "work").glob("launch/*/task.yaml")
            text = file.read_text()
            machines, codes = run_task(text, tmp_path, addresses, names, CANARIES)
            assert codes == [0, 0], [machine.text() for machine in machines]
            assert main(["launch", "skypilot", "run.toml", "--unchecked"]) == 0
    assert sorted(yaml.safe_load(text)["secrets"]) == sorted(named)
    words = (sky.parent / "words").read_text().splitlines()
    assert words[-2:] == [str(secrets), str(file)]
    check_used(used)
    assert files_with_canaries(tmp_path) == {secrets: [name for name in CANARIES if name not in named]}
    shown = capfd.readouterr()
    assert [name for data in (*lines, shown.out.encode(), shown.err.encode()) for name in canaries_in(data)] == []


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_names_and_paths_are_taken_as_they_are(tmp_path, text):
    work = tmp_path / text
    work.mkdir()
    out = tmp_path / "bucket" / text
    launch = {"setup": ["export FROM_SETUP=1"], "skypilot": {"mounts": {str(tmp_path / "bucket"): f"s3://{text}"}}}
    fields = {"name": text, "folder": str(work), "out": str(out), "run_file": f"{text}.toml", "nodes": 2}
    job = replace(in_container(launch), overrides=(f"name={text}", f"train.out={out}"), **fields)
    skypilot.check(job, submit=True)
    for name, content in {"codes": "0\n", "out": str(out)}.items():
        (tmp_path / name).write_text(content)
    kumi = shlex.join([sys.executable, str(STAND_IN), str(tmp_path)])
    machines, codes = run_task(skypilot.text(job), tmp_path, ("10.0.0.1", "10.0.0.2"), kumi=f'exec {kumi} "$@"')
    assert codes == [0, 0], [machine.text() for machine in machines]
    given = f"./{text}.toml" if text.startswith("-") else f"{text}.toml"
    for rank in range(2):
        seen = json.loads((tmp_path / f"node-{rank}-0.json").read_text())
        assert seen["words"] == ["train", given, f"name={text}", f"train.out={out}"]
        place = {name: seen["environment"][name] for name in ("KUMI_HEAD", "KUMI_NODES", "KUMI_NODE", "FROM_SETUP")}
        expected = {"KUMI_HEAD": "10.0.0.1:29400", "KUMI_NODES": "2", "KUMI_NODE": str(rank), "FROM_SETUP": "1"}
        assert place == expected
    described = yaml.safe_load(skypilot.text(job))
    assert described["workdir"] == str(work)
    assert described["file_mounts"] == {str(tmp_path / "bucket"): {"source": f"s3://{text}", "mode": "MOUNT"}}
    assert list(tmp_path.rglob("pwned")) == []
    assert list(Path.cwd().glob("pwned")) == []
