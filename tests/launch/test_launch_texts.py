"""The files of all launchers: as stored, complete in themselves, and with nothing in them that they must not have."""

from __future__ import annotations

import json
import os
import re
import subprocess

import pytest
from launch_jobs import GOLDEN, GPU_JOB, TEXTS, job_with
from pydantic import BaseModel

from kumi.config import from_dict
from kumi.config.cluster_source import cluster_spec
from kumi.config.launch_section import LINE, LaunchSection
from kumi.errors import ConfigError
from kumi.launch import slurm
from kumi.launch.cluster_launchers import CLUSTER_LAUNCHERS
from kumi.launch.launch_job import launch_job


@pytest.mark.parametrize("file", TEXTS)
def test_files_are_as_stored(file):
    """After a change that is meant: python tests/launch/launch_jobs.py, and read the difference."""
    kind, job = TEXTS[file]
    assert CLUSTER_LAUNCHERS[kind].text(job) == (GOLDEN / file).read_text()


def test_every_stored_file_is_checked():
    assert {file.name for file in GOLDEN.iterdir()} == set(TEXTS)


@pytest.mark.parametrize("kind", CLUSTER_LAUNCHERS)
def test_a_text_depends_on_its_job_only(kind, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "c4n4ry")
    job = job_with({"env": ["HF_TOKEN"] if kind in ("slurm", "skypilot") else [], "hosts": ["a", "b", "c", "d"]})
    before = CLUSTER_LAUNCHERS[kind].text(job)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HF_TOKEN", "another")
    assert CLUSTER_LAUNCHERS[kind].text(job) == before
    assert "c4n4ry" not in before


@pytest.mark.parametrize("file", [file for file in TEXTS if file.endswith((".sbatch", ".sh"))])
def test_bash_reads_the_scripts(file):
    assert subprocess.run(["bash", "-n", GOLDEN / file], capture_output=True, text=True).stderr == ""


def test_each_extra_option_is_one_line_unchanged():
    options = ("--reservation='x y'", '--comment="#"', "-p a", "$(b)", "模型")
    lines = slurm.text(job_with({"slurm": {"extra": options}})).splitlines()
    assert [lines.count(f"#SBATCH {option}") for option in options] == [1] * len(options)
    assert len(lines) == len(slurm.text(GPU_JOB).splitlines()) + len(options) - 1  # without --time


@pytest.mark.parametrize("option", ["--gres=gpu:8", "--gpus-per-node=h100:8", "--gpus=8", "-G 8"])
def test_gpus_are_asked_for_once(option):
    text = slurm.text(job_with({"slurm": {"extra": [option]}}))
    assert text.count("gpu") - text.count("/gpu") == 1 or option == "-G 8"
    assert "--gpus-per-node=8" not in text


@pytest.mark.parametrize(
    ("device", "kind", "option"),
    [("NVIDIA H100 80GB HBM3", "cuda", ["--nv"]), ("AMD Instinct MI300X", "cuda", ["--rocm"]), ("CPU", "cpu", [])],
)
def test_apptainer_gets_the_devices_of_the_cluster(device, kind, option):
    section = {"slurm": {"container": "/a b.sif", "container_runtime": "apptainer", "mounts": ["/x", "/y:/z:ro"]}}
    job = job_with(section, program=("kumi",), device=device, device_kind=kind)
    (step,) = re.findall(r"kumi-node \\\n    (.*) &\n", slurm.text(job))
    mounts = "--bind /x,/y:/z:ro '/a b.sif'"
    options = "".join(f"{word} " for word in option)
    assert step == f"apptainer exec {options}--pwd /home/u/work {mounts} kumi train run.toml optim.lr=2e-5"
    assert "--container-image" not in slurm.text(job)


def run_config(name="tiny", out="runs/tiny", cluster=None, **launch):
    return from_dict(
        {
            "name": name,
            "model": {"init": "random", "config": {}},
            "cluster": cluster or {"source": "h100-sxm", "nodes": 2, "network": "ib-ndr"},
            "batch": {"seq_len": 8, "tokens_per_step": 64},
            "data": {"sources": [{"path": "x"}], "tokenizer": "t"},
            "train": {"steps": 1, "out": out},
            "launch": launch,
        }
    )


def job_of(config, run_file="run.toml", overrides=()):
    cluster = cluster_spec(config.cluster)
    places = {"program": ("kumi",), "folder": "/w", "files": "/w/launch"}
    return launch_job(config, cluster, run_file=run_file, run_text="", overrides=overrides, **places)


def test_a_job_is_the_run_file_s_and_the_cluster_s():
    overrides = ["a.b=c", "launch.env=['A']"]  # the nodes need no key of [launch]
    job = job_of(run_config(time_limit="1d", memory="2 GiB", out="~/x"), overrides=overrides)
    assert (job.nodes, job.devices_per_node, job.device_kind) == (2, 8, "cuda")
    assert (job.time_limit, job.save_seconds, job.memory) == (86400, 300, 2 * 2**30)
    assert job.out == f"{os.environ['HOME']}/x"
    assert job.command == ("kumi", "train", "run.toml", "a.b=c")
    assert job_of(run_config(), run_file="-x.toml").command == ("kumi", "train", "./-x.toml")


def test_a_run_folder_below_the_home_of_a_container_is_refused():
    with pytest.raises(ConfigError, match=r"train.out='~/runs' begins with ~, which in the container .* whole path"):
        job_of(run_config(out="~/runs", slurm={"container": "kumi.sqsh"}))
    assert job_of(run_config(out="/runs", slurm={"container": "kumi.sqsh"})).out == "/runs"


@pytest.mark.parametrize("hostile", ["a\nb", "a\rb", "a\x1bb", "a\tb", "a\x7f"])
def test_control_characters_are_refused_wherever_they_could_begin_a_line(hostile):
    for config in (run_config(name=hostile), run_config(out=hostile)):
        with pytest.raises(ConfigError, match="has a line break or another control character"):
            job_of(config)
    with pytest.raises(ConfigError, match=r"run file: .* control character"):
        job_of(run_config(), run_file=hostile)
    with pytest.raises(ConfigError, match=r"override 2: .* control character"):
        job_of(run_config(), overrides=["a=b", hostile])
    for key in ("partition", "container"):
        with pytest.raises(ConfigError, match=rf"launch.slurm.{key}: must be one line of text"):
            run_config(slurm={key: hostile})
    for key in ("extra", "mounts"):
        with pytest.raises(ConfigError, match=rf"launch.slurm.{key}.0: must be one line of text"):
            run_config(slurm={key: [hostile]})
    with pytest.raises(ConfigError, match=r"launch.setup.0: must be one line of text"):
        run_config(setup=[hostile])


def text_keys(section, path=()):
    """Yield the path of each key of [launch] that is or has a line of any text, and values of it, the line being {}."""
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from text_keys(field.annotation, (*path, key))
        elif any(repr(LINE) in str(part) for part in (field.annotation, field.metadata)):
            kind = str(field.annotation)
            yield (
                (*path, key),
                [{"{}": "a"}, {"a": "{}"}] if "dict" in kind else [["{}"]] if "tuple" in kind else ["{}"],
            )


def test_no_key_of_a_launcher_takes_a_line_break():
    paths = [path for path, _ in text_keys(LaunchSection)]
    assert {("hosts",), ("env_file",), ("ssh", "folder"), ("skypilot", "mounts"), ("slurm", "extra")} <= set(paths)
    for path, values in text_keys(LaunchSection):
        for value in values:
            launch = json.loads(json.dumps(value).replace("{}", "a\\nb"))
            for key in reversed(path):
                launch = {key: launch}
            with pytest.raises(ConfigError, match=rf"launch\.{path[0]}"):
                run_config(**launch)


def test_the_devices_of_a_login_node_are_no_description_of_the_cluster():
    with pytest.raises(ConfigError, match=r"cluster.devices_per_node is unset .* set cluster.source to a preset"):
        job_of(run_config(cluster={"nodes": 2}))
    assert job_of(run_config(cluster={"devices_per_node": 2})).devices_per_node == 2


def test_a_job_has_time_to_train_before_it_saves():
    with pytest.raises(ConfigError, match=r"launch.save_time='5m' is not shorter than launch.time_limit='300s'"):
        job_of(run_config(time_limit="300s"))
    assert job_of(run_config(time_limit="1.5h", save_time="90 s")).save_seconds == 90


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"slurm": {"partion": "x"}}, "launch.slurm.partion: unknown key; did you mean 'partition'"),
        ({"kubernetes": {"api": "pod"}}, "launch.kubernetes.api: must be 'job', 'jobset' or 'trainjob', got 'pod'"),
        ({"time_limit": "1 day"}, "launch.time_limit: '1 day' is not a duration; write a number and one of"),
        ({"time_limit": "0h"}, "launch.time_limit: '0h' is not a duration from 1s to 3650d"),
        ({"memory": "many"}, "launch.memory: 'many' is not a quantity"),
        ({"env": ["A=b"]}, "launch.env.0: must be the name of an environment variable, got 'A=b'"),
        ({"slurm": {"extra": ["a\0b"]}}, "launch.slurm.extra.0: must be one line of text without control characters"),
    ],
)
def test_wrong_keys_are_named(launch, words):
    with pytest.raises(ConfigError) as refused:
        run_config(**launch)
    assert words in str(refused.value)


def test_names_of_hosts_are_labels_and_differ_where_names_do():
    names = ["tiny", "Tiny", "tiny ", "a b", "a-b", "1x", "模型", "x" * 80, "x" * 81, "-a", "a-", "a.b", "$(touch x)"]
    labels = [job_with(name=name).host_name for name in names]
    assert labels[0] == "tiny"
    assert len(set(labels)) == len(names)
    for label in labels:
        assert label.replace("-", "").isalnum()
        assert label.isascii()
        assert label == label.lower()
        assert label[0].isalpha()
        assert label[-1] != "-"
        assert len(label) <= 48
