"""Tasks of SkyPilot: read by SkyPilot itself, and run as processes with the variables that SkyPilot sets."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from canaries import CANARIES, canaries_in, check_used, command_lines, exports, files_with_canaries, services
from launch_jobs import HOSTILE, TEXTS, in_container
from provide_skypilot import HOME, PYTHON
from tests.train.conftest import losses, run_file

from forked import run_forked
from kumi.cli import main
from kumi.errors import ConfigError
from kumi.launch import skypilot
from namespaces import two_namespaces

READER = Path(__file__).parent / "read_tasks.py"
STAND_IN = Path(__file__).parent / "stand_in_node.py"
SOURCE = str(Path(__file__).parents[2] / "src")
EXAMPLES = Path(__file__).parents[2] / "examples"
MOUNTS = {"/runs": "s3://bucket/runs"}


# SkyPilot's own parser


@pytest.fixture
def read_by_skypilot(tmp_path):
    """A function that returns what SkyPilot reads from each of some texts, given secrets by its command line."""
    if not (HOME / "complete").exists():
        pytest.skip("needs SkyPilot in an environment of its own (520 MB): `make skypilot`, as `make test-all` does")
    home, answers = tmp_path / "home", tmp_path / "answers.json"
    home.mkdir()
    (tmp_path / "work").mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def read(texts, secrets=()):
        tasks = [{"text": text, "secrets": [list(secret) for secret in secrets]} for text in texts]
        requests = json.dumps({"accelerators": sorted({name for _, name in skypilot._ACCELERATORS}), "tasks": tasks})
        command = [str(PYTHON), str(READER), str(answers)]
        ended = subprocess.run(command, input=requests, capture_output=True, text=True, env=environment, cwd=home)
        assert ended.returncode == 0, ended.stderr
        return json.loads(answers.read_text())

    return read


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
NAMES = ["tiny", "a b", 'it\'s "so" $(touch pwned)', "--yes", "模型: é", "# no comment", "x" * 100]


def jobs(folder):
    """Jobs with all combinations of the above, with and without GPUs."""
    for number, (device, section, launch) in enumerate(itertools.product(DEVICES, SECTIONS, LAUNCHES)):
        name = NAMES[number % len(NAMES)]
        kind = "cpu" if number % 5 == 4 else "cuda"
        job = in_container({**launch, "skypilot": section})
        yield replace(job, name=name, device=device, device_kind=kind, folder=folder, overrides=(f"name={name}",))


def check_read(job, task, given):
    """Assert that SkyPilot read `task` from the text of `job` as kumi means it."""
    assert "refused" not in task, (skypilot.text(job), task)
    described = yaml.safe_load(skypilot.text(job))
    assert (task["name"], task["nodes"], task["workdir"]) == (job.host_name, job.nodes, job.folder)
    assert (task["run"], task["setup"]) == (described["run"], described["setup"])
    gpus = [f"{name}:{count}" for name, count in (task["accelerators"] or {}).items()]
    assert gpus == [described["resources"]["accelerators"]] if job.uses_gpus else gpus == []
    section = job.launch.skypilot
    assert task["spot"] == section.spot
    recovery = {"max_restarts_on_errors": job.launch.requeues, "recover_on_exit_codes": [7, 75]}
    assert recovery.items() <= task["recovery"].items()
    assert task["cpus"] == (None if job.launch.cpus is None else f"{job.launch.cpus}+")
    buckets = {path: source for path, source in section.mounts.items() if "://" in source}
    assert task["storage"] == buckets
    assert task["volumes"] == {path: source for path, source in section.mounts.items() if path not in buckets}
    # A secret of the command line has its value, one without is asked for; neither is in what SkyPilot shows.
    assert task["secrets"] == dict(given)
    assert sorted({*task["managed"], *dict(given)}) == sorted({*job.launch.env, *dict(given)})
    assert [value for _, value in given if value in task["shown"]] == []


@pytest.mark.exhaustive
def test_skypilot_reads_every_task_as_kumi_means_it(read_by_skypilot, tmp_path):
    folder = str(tmp_path / "work")
    every = [*jobs(folder), replace(TEXTS["task.yaml"][1], folder=folder)]
    texts = [skypilot.text(job) for job in every]
    for given in ([], [("HF_TOKEN", "c4n4ry-of-the-hub"), ("OF_THE_FILE", "c4n4ry-of-a-file")]):
        for job, task in zip(every, read_by_skypilot(texts, given), strict=True):
            check_read(job, task, given)


@pytest.mark.exhaustive
def test_skypilot_reads_the_tasks_of_all_examples(read_by_skypilot, tmp_path, monkeypatch, capsys):
    """By the command, on the clusters that they name or on two machines of two cores."""
    monkeypatch.chdir(tmp_path / "work")
    files = [file for file in sorted(EXAMPLES.rglob("*.toml")) if "clusters" not in file.parts]
    runs = [file for file in files if "train" in tomllib.loads(file.read_text())]
    assert len(runs) >= 6
    texts = []
    for file in runs:
        words = [
            "--unchecked",
            "train.out=/runs/x",
            "cluster.nodes=2",
            "launch.skypilot.mounts={'/runs'='s3://bucket'}",
        ]
        cluster = tomllib.loads(file.read_text()).get("cluster", {})
        words += ["data.cache=/runs/data"] if "cache" in tomllib.loads(file.read_text())["data"] else []
        words += ["cluster.devices_per_node=2"] if cluster.get("source", "auto") == "auto" else []
        assert main(["launch", "skypilot", str(file), *words]) == 0
        texts.append(capsys.readouterr().out)
    for file, text, task in zip(runs, texts, read_by_skypilot(texts), strict=True):
        assert "refused" not in task, (file, task)
        assert task["run"] == yaml.safe_load(text)["run"]


# Path to a key in the stored task, and a mistake: another name of the key, or a value.
MISTAKES = [
    (("num_nodes",), "num_nodez", None),
    (("num_nodes",), None, "four"),
    (("num_nodes",), None, 0),
    (("name",), None, 3),
    (("name",), None, "a b"),
    (("workdir",), "work_dir", None),
    (("workdir",), None, ["/tmp"]),
    (("workdir",), None, "/no/such/folder"),
    (("setup",), "set_up", None),
    (("setup",), None, ["true"]),
    (("run",), None, {"a": "b"}),
    (("run",), "runs", None),
    (("secrets",), "secret", None),
    (("secrets",), None, ["HF_TOKEN"]),
    (("file_mounts",), "file_mount", None),
    (("file_mounts", "/runs", "mode"), None, "MOUNTED"),
    (("file_mounts", "/runs", "source"), "sauce", None),
    (("volumes",), None, ["corpora"]),
    (("volumes",), "volume", None),
    (("resources", "accelerators"), None, "H100:many"),
    (("resources", "accelerators"), None, "H100:8:8"),
    (("resources", "accelerators"), "accelerator", None),
    (("resources", "infra"), None, "nowhere"),
    (("resources", "cpus"), None, "many"),
    (("resources", "memory"), None, "200 GiB"),
    (("resources", "use_spot"), None, "perhaps"),
    (("resources", "use_spot"), "spot", None),
    (("resources", "image_id"), None, 7),
    (("resources", "job_recovery"), "job_recover", None),
    (("resources", "job_recovery", "strategy"), None, "HOPE"),
    (("resources", "job_recovery", "recover_on_exit_codes"), None, ["seven"]),
    (("resources", "job_recovery", "recover_on_exit_codes"), None, [7, 256]),
    (("resources", "job_recovery", "max_restarts_on_errors"), None, "often"),
]


def with_mistake(folder, path, name, value):
    """The stored task with a mistake."""
    job = replace(TEXTS["task.yaml"][1], folder=folder)
    task = yaml.safe_load(skypilot.text(job))
    node = task
    for part in path[:-1]:
        node = node[part]
    before = node.pop(path[-1], None)
    node[name or path[-1]] = before if value is None else value
    return yaml.safe_dump(task)


@pytest.mark.exhaustive
def test_skypilot_refuses_mistakes_in_a_task(read_by_skypilot, tmp_path):
    texts = [with_mistake(str(tmp_path / "work"), *mistake) for mistake in MISTAKES]
    texts.append(skypilot.text(TEXTS["task.yaml"][1]) + "num_nodes: 4\n")  # a key twice
    answers = read_by_skypilot(texts)
    accepted = [mistake for mistake, answer in zip([*MISTAKES, "a key twice"], answers) if "refused" not in answer]
    assert accepted == []
    assert "did you mean 'num_nodes'" in answers[0]["refused"]


@pytest.mark.exhaustive
def test_skypilot_reads_a_variable_in_a_path_which_kumi_refuses(read_by_skypilot, tmp_path):
    """SkyPilot puts the values of secrets into paths, where they would be shown: the reason of kumi's rule."""
    job = in_container({"env": ["HF_TOKEN"], "skypilot": {"mounts": {"/runs": "s3://bucket-$HF_TOKEN/runs"}}})
    job = replace(job, folder=str(tmp_path / "work"))
    (task,) = read_by_skypilot([skypilot.text(job)], [("HF_TOKEN", "c4n4ry")])
    assert task["storage"] == {"/runs": "s3://bucket-c4n4ry/runs"}


def test_data_that_the_machines_would_not_share_is_refused(tmp_path):
    job = replace(in_container({"skypilot": {"mounts": MOUNTS}}), folder=str(tmp_path))
    for cache in ("tokens", "/data/tokens"):
        with pytest.raises(
            ConfigError, match=rf"data.cache='{cache}' is in no folder of .*mounts \(/runs\), so the other"
        ):
            skypilot.check(replace(job, data_cache=cache), submit=False)
        skypilot.check(replace(job, data_cache=cache, nodes=1), submit=False)
    skypilot.check(replace(job, data_cache="/runs/tokens"), submit=False)
    (tmp_path / "tokens").mkdir()  # prepared here, and copied with the working directory
    skypilot.check(replace(job, data_cache="tokens"), submit=False)


@pytest.mark.parametrize(
    ("fields", "mounts"),
    [
        ({"folder": "/home/${HF_TOKEN}/work"}, {"/runs": "s3://bucket"}),
        ({}, {"/runs": "s3://bucket", "/data/$X": "corpora"}),
        ({}, {"/runs": "s3://$USER"}),
    ],
)
def test_a_variable_in_a_path_is_refused(fields, mounts):
    job = replace(in_container({"skypilot": {"mounts": mounts}}), **fields)
    with pytest.raises(ConfigError, match=r"SkyPilot would replace \$\{?\w+\}? by the value of the secret"):
        skypilot.check(job, submit=False)


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
        common = {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": SOURCE,
            "KUMI_NUMERICS": "reference",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "SKYPILOT_TASK_ID": f"sky-managed-2026-11-26-10-00-00-000000_{task['name']}_1-0",
        }
        place = {
            "NUM_GPUS_PER_NODE": str((task["resources"].get("accelerators") or ":0").partition(":")[2]),
            "NODE_IPS": "\n".join(addresses),
            "NODE_RANK": str(rank),
        }
        self.environments = {
            "setup": common | {f"SKYPILOT_SETUP_{name}": value for name, value in place.items()},
            "run": common
            | {"SKYPILOT_NUM_NODES": str(task["num_nodes"])}
            | {f"SKYPILOT_{name}": value for name, value in place.items()},
        }

    def start(self, section, secrets):
        """Start the script `section`, setup or run, as SkyPilot does: a file of the home, in the working directory."""
        script = self.folder / f"{section}.sh"
        script.write_text(f"#!/bin/bash\ncd ~/sky_workdir\n{self.task[section]}")
        environment = {**self.environments[section], **secrets}
        with open(self.folder / f"{section}.log", "wb") as log:
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
        "data__cache": str(bucket / "tokens"),
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
    with (
        two_namespaces(addresses) as names,
        command_lines() as lines,
        services(tmp_path, small.folder / "run" / "hf", addresses[0], names[0]) as used,
    ):
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
    check_used(used, machines[0].text())
    assert files_with_canaries(tmp_path) == {secrets: [name for name in CANARIES if name not in named]}
    shown = capfd.readouterr()
    assert [name for data in (*lines, shown.out.encode(), shown.err.encode()) for name in canaries_in(data)] == []


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_names_and_paths_are_taken_as_they_are(tmp_path, text):
    if "${" in text:
        with pytest.raises(ConfigError, match=r"SkyPilot would replace"):
            skypilot.check(in_container({"skypilot": {"mounts": {"/runs": f"s3://{text}"}}}), submit=False)
        text = text.replace("${HOME}", "$ {HOME}")
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
