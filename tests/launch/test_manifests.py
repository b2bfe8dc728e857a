"""Manifests are valid by the schemas of Kubernetes and Kubeflow, which refuse each of thirty mistakes in them."""

from __future__ import annotations

import copy
from dataclasses import replace
from importlib.util import find_spec

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from launch_jobs import IN_CONTAINER, TEXTS, in_container
from schemas import check_manifest

from kumi.config.launch_section import LaunchSection
from kumi.errors import ConfigError
from kumi.launch import kubernetes, skypilot
from kumi.launch.manifest_text import NULL, Noted, manifest_text

MANIFESTS = [file for file, (kind, _) in TEXTS.items() if kind == "kubernetes"]
CHECKED = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None or find_spec("kubeflow_trainer_api") is None,
    reason="needs kubernetes-validate and kubeflow-trainer-api: pip install kumi[launch-check]",
)


def documents(file):
    kind, job = TEXTS[file]
    assert kind == "kubernetes"
    return list(yaml.safe_load_all(kubernetes.text(job)))


@CHECKED
@pytest.mark.parametrize("file", MANIFESTS)
def test_manifests_are_valid(file):
    for document in documents(file):
        check_manifest(document)


# File of `golden`, path to a key in its last document, and a mistake: another name of the key, or a value.
JOB, JOBSET, TRAINJOB = "job-rdma.yaml", "jobset.yaml", "trainjob.yaml"
CHILD = ("replicatedJobs", 0, "template", "spec")
POD = ("template", "spec")
PATCH = ("runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "replicatedJobs", 0, "template", "spec", *POD)
MISTAKES = [
    (JOB, ("completionMode",), "completionMood", None),
    (JOB, ("parallelism",), None, "four"),
    (JOB, ("completions",), None, "4"),
    (JOB, ("backoffLimitPerIndex",), "backoffLimitPerIndices", None),
    (JOB, ("maxFailedIndexes",), None, "0"),
    (JOB, ("podReplacementPolicy",), None, 1),
    (JOB, ("activeDeadlineSeconds",), None, "7d"),
    (JOB, ("podFailurePolicy", "rules"), "rule", None),
    (JOB, ("podFailurePolicy", "rules", 1, "action"), "actions", None),
    (JOB, ("podFailurePolicy", "rules", 1, "onExitCodes", "values"), None, ["2"]),
    (JOB, ("podFailurePolicy", "rules", 0, "onPodConditions"), None, {"type": "DisruptionTarget"}),
    (JOB, (*POD, "subdomain"), "subDomain", None),
    (JOB, (*POD, "terminationGracePeriodSeconds"), None, "300s"),
    (JOB, (*POD, "containers", 0, "image"), "imgae", None),
    (JOB, (*POD, "securityContext", "runAsUser"), None, "10001"),
    (JOB, (*POD, "securityContext", "fsGroup"), "fsgroup", None),
    (JOB, (*POD, "containers", 0, "command"), None, "kumi train run.toml"),
    (JOB, (*POD, "containers", 0, "env", 2, "valueFrom"), "valueForm", None),
    (JOB, (*POD, "containers", 0, "env", 1, "value"), None, 4),
    (JOB, (*POD, "containers", 0, "envFrom", 0, "secretRef"), "secret", None),
    (JOB, (*POD, "containers", 0, "securityContext", "capabilities", "add"), None, "IPC_LOCK"),
    (JOB, (*POD, "volumes", 1, "persistentVolumeClaim", "claimName"), "claim", None),
    (JOB, (*POD, "volumes", 3, "emptyDir", "medium"), "mediums", None),
    (JOB, (*POD, "nodeSelector", "gpu"), None, 1),
    (JOBSET, ("network", "publishNotReadyAddresses"), "publishNotReady", None),
    (JOBSET, ("failurePolicy", "maxRestarts"), None, "many"),
    (JOBSET, (*CHILD, "parallelism"), None, "four"),
    (JOBSET, (*CHILD, "completionMode"), "completionMood", None),
    (JOBSET, ("replicatedJobs", 0, "replicas"), "replica", None),
    (TRAINJOB, ("trainer", "numNodes"), "numNodez", None),
    (TRAINJOB, ("trainer", "numProcPerNode"), None, "1"),
    (TRAINJOB, ("runtimeRef", "name"), None, 3),
    (TRAINJOB, (*PATCH, "securityContext"), "securityContexts", None),
    (TRAINJOB, (*PATCH, "volumes"), "volume", None),
    (TRAINJOB, (*PATCH, "containers", 0, "volumeMounts"), "mounts", None),
]


@CHECKED
@pytest.mark.parametrize(("file", "path", "name", "value"), MISTAKES, ids=lambda item: str(item)[:40])
def test_mistakes_are_refused(file, path, name, value):
    document = copy.deepcopy(documents(file)[-1])
    node = document["spec"]
    for part in path[:-1]:
        node = node[part]
    old = node.pop(path[-1])
    node[name or path[-1]] = old if value is None else value
    with pytest.raises(Exception, match=r".+"):
        check_manifest(document)


def pod(job):
    *_, workload = yaml.safe_load_all(kubernetes.text(job))
    return workload["spec"]["template"]["spec"]


def container(job):
    return pod(job)["containers"][0]


def test_a_pod_learns_its_place_and_runs_the_run_file_as_it_is():
    config_map, service, workload = yaml.safe_load_all(kubernetes.text(IN_CONTAINER))
    assert config_map["data"]["run.toml"] == IN_CONTAINER.run_text
    assert service["spec"]["clusterIP"] == "None"
    assert container(IN_CONTAINER)["command"] == ["kumi", "train", "/run/kumi/run.toml", "optim.lr=2e-5"]
    place = {entry["name"]: entry.get("value") for entry in container(IN_CONTAINER)["env"]}
    assert place == {"KUMI_HEAD": "qwen3-8b-chat-0.qwen3-8b-chat:29400", "KUMI_NODES": "4", "KUMI_NODE": None}
    assert workload["spec"]["completions"] == workload["spec"]["parallelism"] == 4


def test_a_pod_has_the_user_and_the_group_that_the_run_file_names():
    assert "securityContext" not in pod(IN_CONTAINER)
    assert pod(in_container({"kubernetes": {"user": 0}}))["securityContext"] == {"runAsUser": 0}
    context = pod(in_container({"kubernetes": {"user": 10001, "group": 2000}}))["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (10001, 2000, 2000)
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"


def test_kubernetes_replaces_nothing_in_commands():
    job = in_container({"setup": ["export A=$(hostname)"]})
    words = container(job)["command"]
    assert words[:3] == ["bash", "-c", 'export A=$$(hostname) && exec "$$@"']
    hostile = container(replace(IN_CONTAINER, overrides=("name=$(KUMI_HEAD)",)))
    assert hostile["command"][-1] == "name=$$(KUMI_HEAD)"


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"env": ["HF_TOKEN"]}, r"launch.env would write its values into a manifest"),
        ({"env_file": "/x"}, r"launch.env_file would write .* set launch.kubernetes.secrets = \['NAME'\]"),
        ({"kubernetes": {"api": "trainjob", "secrets": ["a"]}}, r"a TrainJob takes Secrets from its runtime only"),
    ],
)
def test_secrets_are_named_never_written(launch, words):
    with pytest.raises(ConfigError, match=words):
        kubernetes.check(in_container(launch), submit=False)


def test_a_run_file_must_fit_into_a_config_map():
    job = in_container()
    too_long = replace(job, run_text="#" * 10**6)
    with pytest.raises(ConfigError, match=r"more than 900000 bytes, which no ConfigMap holds"):
        kubernetes.check(too_long, submit=False)


TREES = st.recursive(
    st.text() | st.integers() | st.booleans() | st.just(NULL),
    lambda inner: st.dictionaries(st.text(min_size=1), inner, min_size=1),
    max_leaves=12,
)


def as_read(value):
    if isinstance(value, dict):
        return {key: as_read(item) for key, item in value.items()}
    return None if value is NULL else value


@given(st.dictionaries(st.text(min_size=1), TREES, min_size=1))
def test_any_value_is_read_back(tree):
    assert yaml.safe_load(manifest_text([tree], "head")) == as_read(tree)


LINES = st.text(alphabet=" \t#:-'\"|>&*!%@{}[]\n\\aé模😀\u2028\x85", max_size=40)


@given(LINES, st.lists(LINES, min_size=1))
def test_any_run_file_and_list_is_read_back(text, words):
    tree = {"data": {"run.toml": text}, "command": words, "items": [{"a": Noted(text, "why"), "b": 1}]}
    read = yaml.safe_load(manifest_text([tree], "head"))
    assert read == {"data": {"run.toml": text}, "command": words, "items": [{"a": text, "b": 1}]}


@pytest.mark.parametrize(
    "word", ["yes", "No", "null", "~", "1e3", "0x1f", "12:30", "2026-01-01", "<<", "=", ".inf", ""]
)
def test_words_that_look_like_other_values_stay_text(word):
    assert yaml.safe_load(manifest_text([{"a": word, word or "b": "c"}], "head"))["a"] == word


def test_a_task_of_skypilot_is_complete():
    task = yaml.safe_load(skypilot.text(TEXTS["task.yaml"][1]))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (4, "H100:8")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [7, 75]
    assert task["secrets"] == {"HF_TOKEN": None}
    assert task["run"].endswith("exec kumi train run.toml optim.lr=2e-5\n")
    assert LaunchSection().skypilot.mounts == {}


@pytest.mark.parametrize(
    ("device", "accelerator"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA A100-SXM4-80GB", "A100-80GB")],
)
def test_devices_have_the_names_of_skypilot(device, accelerator):
    job = in_container()
    text = skypilot.text(replace(job, device=device))
    assert yaml.safe_load(text)["resources"]["accelerators"] == f"{accelerator}:8"


def test_a_job_that_skypilot_recovers_must_find_its_checkpoints():
    with pytest.raises(
        ConfigError, match=r"train.out='/runs/chat' is in no folder of launch.skypilot.mounts \(/data\)"
    ):
        skypilot.check(in_container({"skypilot": {"mounts": {"/data": "s3://x"}}}), submit=False)
    skypilot.check(in_container({"skypilot": {"mounts": {"/runs": "s3://x"}}}), submit=False)
    skypilot.check(replace(in_container(), on_store=True), submit=False)


@pytest.mark.parametrize("api", ["job", "jobset"])
def test_pods_must_find_the_checkpoints_of_pods_before_them(api):
    with pytest.raises(
        ConfigError, match=r"train.out='/runs/chat' is in no folder of launch.kubernetes.volumes \(/data, /run\)"
    ):
        kubernetes.check(
            in_container({"kubernetes": {"api": api, "volumes": {"/data": "a", "/run": "b"}}}), submit=False
        )
    kubernetes.check(in_container({"kubernetes": {"api": api, "volumes": {"/runs": "a"}}}), submit=False)
    kubernetes.check(replace(in_container({"kubernetes": {"api": api}}), on_store=True), submit=False)


def test_a_train_job_may_have_the_volumes_of_its_runtime():
    kubernetes.check(in_container({"kubernetes": {"api": "trainjob"}}), submit=False)
