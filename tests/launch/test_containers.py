"""The Dockerfile's image: small, for any user, fit to be process 1; and what the launchers' files ask of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from container_image import MISSING, ROOT, ContainerImage, NoCpuBuildError, instructions
from launch_jobs import in_container, job_with
from mini_slurm import MiniSlurm

from kumi.cli import main
from kumi.launch import kubernetes, slurm

DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = instructions(DOCKERFILE)
COMPATIBILITY = (ROOT / "docs" / "compatibility.md").read_text()
PAGE = (ROOT / "docs" / "containers.md").read_text()
# Arguments and their defaults; "" without.
ARGUMENTS: dict[str, str] = {}
for declared in (words for name, words in INSTRUCTIONS if name == "ARG"):  # VARIANT is declared once for each stage
    ARGUMENTS.setdefault(declared.partition("=")[0], declared.partition("=")[2])
RUN = """
name = "tiny"
[model]
init = "random"
config = { model_type = "llama", architectures = ["LlamaForCausalLM"], vocab_size = 300, hidden_size = 32, \
intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 2, \
max_position_embeddings = 64, rms_norm_eps = 1e-5, tie_word_embeddings = true }
[cluster]
devices_per_node = 2
[batch]
seq_len = 64
tokens_per_step = 512
[data]
tokenizer = { vocab_size = 300 }
sources = [{ path = "{stdlib}/json/*.py" }]
validation = 0
workers = 1
[optim]
warmup_steps = 0
[train]
steps = 6
out = "runs/tiny"
[export]
enabled = false
"""


def words_of(kind):
    return [words for name, words in INSTRUCTIONS if name == kind]


def test_the_image_s_user_is_a_number_and_not_root():
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", words_of("USER")[-1])
    assert INSTRUCTIONS.index(("USER", words_of("USER")[-1])) > max(
        number for number, (name, _) in enumerate(INSTRUCTIONS) if name in ("RUN", "COPY")
    )


def test_commands_are_words_of_kumi_without_an_entrypoint(capsys):
    assert words_of("ENTRYPOINT") == []
    (health,) = words_of("HEALTHCHECK")
    for words in (json.loads(words_of("CMD")[-1]), json.loads(health.partition(" CMD ")[2])):
        assert words.pop(0) == "kumi"
        with pytest.raises(SystemExit, match=r"^0$"):
            main(words)


def test_the_image_has_the_versions_that_are_tested():
    assert f'"torch=={ARGUMENTS["TORCH"]}"' in (ROOT / "Makefile").read_text()
    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", ARGUMENTS["BASE"])[1]
    assert re.search(rf"^\| {re.escape(python)}\.\d+ \| {re.escape(ARGUMENTS['TORCH'])} \|", COMPATIBILITY, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(ARGUMENTS["EXTRAS"].split(",")) <= set(project["optional-dependencies"])


def test_only_wheels_reach_the_builder_and_the_file_names_no_host_and_no_secret():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules == ["*", "!dist/*.whl"]
    assert "://" not in DOCKERFILE
    assert [
        words for words in words_of("ARG") + words_of("ENV") if re.search(r"(?i)token|secret|passw|key", words)
    ] == []


def test_the_page_lists_the_build_arguments_with_their_defaults():
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (?:`(.*?)`)? ?\|", PAGE, re.M))
    assert rows == ARGUMENTS
    assert set(re.findall(r"--build-arg (\w+)=", PAGE + (ROOT / "Makefile").read_text())) <= set(ARGUMENTS)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """The image for CPUs, built by Podman as the user of this machine; skipped where it cannot be built."""
    if MISSING:
        pytest.skip(f"needs podman, runc and mmdebstrap (apt-get install) as root; missing here: {', '.join(MISSING)}")
    try:
        with ContainerImage(tmp_path_factory.mktemp("image")) as image:
            yield image
    except NoCpuBuildError as error:
        pytest.skip(f"pip knows no {error}, PyTorch's build for CPUs: add PyTorch's index to pip's configuration")


@pytest.fixture
def folder(tmp_path):
    """A folder with a run file, in which any user may write."""
    tmp_path.chmod(0o777)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def saved_steps(folder):
    return sorted(int(path.name[5:]) for path in (folder / "runs" / "tiny" / "checkpoints").glob("step_*"))


def trained_steps(folder):
    metrics = folder / "runs" / "tiny" / "metrics.jsonl"
    return metrics.read_text().count("train/loss") if metrics.exists() else 0


@pytest.mark.exhaustive
def test_the_image_has_nothing_of_its_build(image):
    config = image.config()
    assert config["Config"]["User"] == "1000:1000"
    assert config["Size"] < 1.5e9
    mount = Path(image.podman("image", "mount", "kumi:test").strip())
    files = {path.relative_to(mount).as_posix() for path in (mount / "opt" / "kumi").rglob("*")}
    assert not (mount / "wheels").exists()
    assert not (mount / "etc" / "pip.conf").exists()
    assert any(file.endswith("site-packages/kumi/cli/__init__.py") for file in files)
    assert [file for file in files if re.search(r"/tests(/|$)|notes.txt|secrets.env", file)] == []
    assert "c4n4ry" not in json.dumps(config) + image.podman("history", "--no-trunc", "--format", "json", "kumi:test")
    writable = image.run("kumi:test", "sh", "-c", "find / -xdev -type d -writable 2> /dev/null || true").split()
    assert {path for path in writable if not path.startswith(("/proc", "/dev", "/run/lock"))} == {
        "/home/kumi",
        "/work",
        "/tmp",
        "/var/tmp",
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["--user", "54321:54321"]], ids=["image", "any"])
def test_any_user_trains_two_ranks_to_the_end_on_a_root_that_is_read_only(image, folder, options):
    closed = ["--read-only", "--read-only-tmpfs=false", "--volume", f"{folder}:/work", *options]
    output = image.run(*closed, "kumi:test", "kumi", "train", "run.toml")
    assert "finished: 6 steps" in output
    assert saved_steps(folder) == [6]
    assert (folder / "runs" / "tiny" / "config.toml").stat().st_uid == (54321 if options else 1000)


@pytest.mark.exhaustive
def test_the_end_of_a_container_saves_the_run_and_the_same_command_continues(image, folder):
    options = ["--volume", f"{folder}:/work", "kumi:test", "kumi", "train", "run.toml"]
    container = image.start(*options, "train.steps=100000")
    MiniSlurm.wait_for(lambda: trained_steps(folder) > 2, 300)
    health = image.config()["Healthcheck"]["Test"]
    assert health[0] == "CMD"
    assert image.podman("exec", container, *health[1:]).startswith("kumi ")
    image.podman("stop", "--time", "120", container)
    code, output = image.end_of(container)
    assert code == 143, output
    (saved,) = saved_steps(folder)
    assert saved == trained_steps(folder) > 2
    assert "finished" in image.run(*options, f"train.steps={saved + 2}", "--allow-change", "train.steps")
    assert max(saved_steps(folder)) == saved + 2


@pytest.mark.exhaustive
def test_the_health_command_fails_where_kumi_s_files_are_damaged(image, tmp_path):
    place = image.run("kumi:test", "python", "-c", "import kumi; print(kumi.__path__[0])").strip()
    image.run("--volume", f"{tmp_path}:{place}", "kumi:test", *image.config()["Healthcheck"]["Test"][1:], code=1)


@pytest.mark.exhaustive
def test_the_image_runs_the_pods_of_a_manifest(image, folder):
    """Each pod's container starts as its manifest says; the name of node 0 is this machine's."""
    text = RUN.replace('out = "runs', 'out = "/shared/runs').replace(
        "devices_per_node = 2", "nodes = 2\ndevices_per_node = 1"
    )
    section = {"kubernetes": {"image": "kumi:test", "volumes": {"/shared": "claim"}, "user": 10001}}
    job = replace(in_container(section), nodes=2, device_kind="cpu", run_text=text, overrides=())
    config_map, _, workload = yaml.safe_load_all(kubernetes.text(job))
    (folder / "config").mkdir()
    for name, content in config_map["data"].items():
        (folder / "config" / name).write_text(content)
    spec = workload["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    sources = {"run": folder / "config", "volume-0": folder}
    options = ["--user", str(spec["securityContext"]["runAsUser"]), "--read-only", "--tmpfs", "/home/kumi"]
    for mount in container["volumeMounts"]:
        if mount["name"] == "shm":
            options += ["--tmpfs", f"{mount['mountPath']}:mode=1777"]
        else:
            options += ["--volume", f"{sources[mount['name']]}:{mount['mountPath']}"]
    head = next(entry["value"] for entry in container["env"] if entry["name"] == "KUMI_HEAD")
    options += ["--add-host", f"{head.partition(':')[0]}:127.0.0.1"]
    pods = []
    for index in range(workload["spec"]["completions"]):
        place = [f"{entry['name']}={entry.get('value', index)}" for entry in container["env"]]
        environment = [word for item in place for word in ("--env", item)]
        pods.append(image.start(*options, *environment, container["image"], *container["command"]))
    ends = [image.end_of(pod) for pod in pods]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "finished: 6 steps" in ends[0][1]
    assert saved_steps(folder) == [6]


@pytest.mark.exhaustive
def test_slurm_runs_the_image_by_apptainer(image, folder, slurm_cluster, monkeypatch):
    """Apptainer itself is not in Debian: a script with its options starts the same container with Podman."""
    programs, mounted = folder / "bin", str(folder)
    programs.mkdir()
    places = [word for name in ("KUMI_HEAD", "KUMI_NODES", "KUMI_NODE") for word in ("--env", name)]
    podman = shlex.join(image.command("--user", "0", "--volume", f"{folder}:{folder}", *places))
    (programs / "apptainer").write_text(APPTAINER.format(bind=mounted, podman=podman))
    (programs / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    text = RUN.replace("devices_per_node = 2", "nodes = 2\ndevices_per_node = 1")
    (folder / "run.toml").write_text(text)
    section = {"cpus": 2, "memory": "2 GiB", "time_limit": "10m"}
    section["slurm"] = {"container": "kumi:test", "container_runtime": "apptainer", "mounts": [mounted]}
    places = {"folder": str(folder), "out": "runs/tiny", "files": str(folder)}
    job = job_with(section, program=("kumi",), nodes=2, device_kind="cpu", overrides=(), run_text=text, **places)
    (folder / "job.sbatch").write_text(slurm.text(job))
    number = slurm_cluster.run("sbatch", "--parsable", str(folder / "job.sbatch")).strip()
    state = slurm_cluster.wait_for(
        lambda: state if (state := slurm_cluster.job(number)["JobState"]) in ("COMPLETED", "FAILED") else None, 300
    )
    assert state == "COMPLETED", (folder / f"slurm-{number}.out").read_text()
    assert "finished: 6 steps" in (folder / f"slurm-{number}.out").read_text()
    assert saved_steps(folder) == [6]


APPTAINER = """#!/bin/bash
[ "$1" = exec ] && [ "$2" = --pwd ] && [ "$4" = --bind ] && [ "$5" = {bind} ] || exit 99
folder=$3 image=$6
shift 6
exec {podman} --workdir "$folder" "$image" "$@"
"""
