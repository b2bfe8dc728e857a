"""Kubernetes on this machine, as far as the manifests of `kumi launch kubernetes` need it: the controllers of Jobs,
JobSets and TrainJobs, the names of a headless Service, and kubectl. Pods are processes (`pod_process.py`).

The rules are those of the documentation and source of Kubernetes 1.33 (pkg/controller/job), JobSet and Kubeflow
Trainer 2, not those that kumi expects. Keys that this file would ignore are errors. There is no scheduler, no API
server and no image.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml
from pod_process import Node, Pod, only

NAMESPACE = "default"
INDEX = "batch.kubernetes.io/job-completion-index"
# A new pod of an index waits 10 s after its first failure, twice as long after each further one, at most 10 minutes.
# Tests have less time: they divide these.
_BACKOFF, _LONGEST_BACKOFF = 10.0, 600.0
_NO_RESTARTS: dict[str, Any] = {"maxRestarts": 0, "rules": []}  # without a failurePolicy
_DNS = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
_BACKOFF_LIMIT = 6  # failures of a Job without backoffLimitPerIndex
# What the controllers of Kubeflow Trainer, with its ClusterTrainingRuntime torch-distributed, and of JobSet set.
_TORCH_DISTRIBUTED: dict[str, Any] = {
    "completionMode": "Indexed",
    "template": {"spec": {"restartPolicy": "OnFailure", "containers": [{"name": "node"}]}},
}


class Job:
    """The controller of an Indexed Job. `labels`: of its pods, by the owner of the Job."""

    def __init__(self, cluster: Cluster, name: str, spec: Mapping[str, Any], labels: Mapping[str, str] = {}) -> None:
        only(
            spec,
            *("completionMode", "completions", "parallelism", "backoffLimitPerIndex", "maxFailedIndexes"),
            *("podReplacementPolicy", "activeDeadlineSeconds", "podFailurePolicy", "template"),
        )
        assert spec["completionMode"] == "Indexed"
        assert spec.get("podReplacementPolicy", "Failed") == "Failed", "here no pod is replaced while it still ends"
        self.cluster, self.name, self.spec, self.labels = cluster, name, spec, labels
        self._per_index = spec.get("backoffLimitPerIndex")
        self.suspended = False
        self.began = time.monotonic()
        self.active: dict[int, Pod] = {}  # index -> pod
        self.ended: list[tuple[int, Pod]] = []  # index, pod
        self.complete: set[int] = set()
        self.failed_indexes: set[int] = set()
        self.counted: dict[int, int] = {}  # index -> failures that count
        self.ignored: dict[int, int] = {}
        self.reason = ""  # why the Job fails

    @property
    def condition(self) -> str:
        """Complete, Failed, Suspended, or "" while it runs. A Job has failed once its last pod has ended."""
        if self.reason:
            return "" if self.active else "Failed"
        if len(self.complete) == self.spec["completions"]:
            return "Complete"
        return "Suspended" if self.suspended else ""

    def codes(self) -> list[list[int]]:
        """The exit codes of the ended pods of each index, in their order."""
        return [
            [pod.exit_code for index, pod in self.ended if index == each] for each in range(self.spec["completions"])
        ]

    def tick(self) -> None:
        """Do what there is to do now."""
        for index, pod in list(self.active.items()):
            if pod.exit_code is not None:
                del self.active[index]
                self.ended.append((index, pod))
                self._note_end(index, pod)
        deadline = self.spec.get("activeDeadlineSeconds")
        if not self.reason and len(self.failed_indexes) > self.spec.get("maxFailedIndexes", self.spec["completions"]):
            self.reason = "MaxFailedIndexesExceeded"
        if not self.reason and self._per_index is None and self._failures() > _BACKOFF_LIMIT:
            self.reason = "BackoffLimitExceeded"
        if not self.reason and deadline is not None and time.monotonic() > self.began + deadline:
            self.reason = "DeadlineExceeded"
        if self.reason or self.suspended:
            for pod in self.active.values():
                pod.delete()
            return
        for index in sorted(
            set(range(self.spec["completions"])) - set(self.active) - self.complete - self.failed_indexes
        ):
            if len(self.active) < self.spec["parallelism"] and time.monotonic() > self._start_at(index):
                self._create(index)

    def _note_end(self, index: int, pod: Pod) -> None:
        if pod.exit_code == 0:
            self.complete.add(index)
            return
        action = failure_action(self.spec.get("podFailurePolicy", {"rules": []})["rules"], pod)
        if action == "FailJob":
            self.reason = self.reason or "PodFailurePolicy"
        elif action == "FailIndex" or (action == "Count" and self.counted.get(index, 0) == self._per_index):
            self.failed_indexes.add(index)
        else:
            counts = self.ignored if action == "Ignore" else self.counted
            counts[index] = counts.get(index, 0) + 1

    def _failures(self) -> int:
        """Return how often a pod or a container failed."""
        return sum(self.counted.values()) + sum(pod.restarts for pod in self.active.values())

    def _start_at(self, index: int) -> float:
        """Return the time at which the next pod of `index` may start; failures that do not count delay it, too."""
        failures = self.counted.get(index, 0) + self.ignored.get(index, 0)
        ends = [pod.ended_at for each, pod in self.ended if each == index]
        delay = min(_BACKOFF * 2 ** (failures - 1), _LONGEST_BACKOFF) if failures else 0.0
        return max(ends, default=0.0) + delay / self.cluster.node.hurry

    def _create(self, index: int) -> None:
        template = self.spec["template"]
        own = {"job-name": self.name, "batch.kubernetes.io/job-name": self.name, INDEX: str(index)}
        metadata = {
            "name": f"{self.name}-{index}-{next(self.cluster.numbers):05d}",
            "namespace": NAMESPACE,
            "labels": {**template.get("metadata", {}).get("labels", {}), **self.labels, **own},
            "annotations": {INDEX: str(index)},
        }
        number = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
        containers = [{**each, "env": [*each.get("env", ()), number]} for each in template["spec"]["containers"]]
        spec = {**template["spec"], "containers": containers}
        self.active[index] = self.cluster.start(spec, metadata, f"{self.name}-{index}")


def failure_action(rules: Sequence[Mapping[str, Any]], pod: Pod) -> str:
    """Return the action of the first of the `rules` of a podFailurePolicy that the failed `pod` matches; else Count."""
    for rule in rules:
        if "onExitCodes" in rule:
            codes = rule["onExitCodes"]
            here = codes.get("containerName", pod.container) == pod.container and pod.exit_code != 0
            matches = here and (pod.exit_code in codes["values"]) == (codes["operator"] == "In")
        else:
            matches = any(
                each["type"] in pod.conditions and each["status"] == "True" for each in rule["onPodConditions"]
            )
        if matches:
            return str(rule["action"])
    return "Count"


class JobSet:
    """The controller of a JobSet with one Job, which begins anew with new counts when it fails."""

    def __init__(self, cluster: Cluster, name: str, spec: Mapping[str, Any]) -> None:
        only(spec, "network", "failurePolicy", "replicatedJobs")
        assert spec.get("network", _DNS) == _DNS
        (self.replicated,) = spec["replicatedJobs"]
        assert self.replicated["replicas"] == 1
        self.cluster, self.name, self.policy = cluster, name, spec.get("failurePolicy", _NO_RESTARTS)
        self.labels = {"jobset.sigs.k8s.io/jobset-name": name}
        cluster.services[name] = self.labels
        self.failed = self.suspended = False
        self.jobs = [self._new_job()]  # the last one is the present one

    @property
    def condition(self) -> str:
        """Completed, Failed, Suspended, or "" while it runs."""
        if self.failed:
            return "Failed"
        return {"Complete": "Completed", "Suspended": "Suspended"}.get(self.jobs[-1].condition, "")

    @property
    def active(self) -> dict[int, Pod]:
        return self.jobs[-1].active

    def codes(self) -> list[list[int]]:
        """The exit codes of the ended pods of each index, in their order."""
        return [[*chain(*each)] for each in zip(*(job.codes() for job in self.jobs))]

    def tick(self) -> None:
        """Do what there is to do now."""
        job = self.jobs[-1]
        job.suspended = self.suspended
        job.tick()
        if job.condition != "Failed" or self.failed:
            return
        actions = [rule["action"] for rule in self.policy["rules"] if job.reason in rule["onJobFailureReasons"]]
        if actions[:1] == ["FailJobSet"] or len(self.jobs) > self.policy["maxRestarts"]:
            self.failed = True
        else:
            self.jobs.append(self._new_job())

    def _new_job(self) -> Job:
        spec = json.loads(json.dumps(self.replicated["template"]["spec"]))
        spec["template"]["spec"].setdefault("subdomain", self.name)
        return Job(self.cluster, f"{self.name}-{self.replicated['name']}-0", spec, self.labels)


def train_job(cluster: Cluster, name: str, spec: Mapping[str, Any]) -> JobSet:
    """Return the JobSet that Kubeflow Trainer makes of a TrainJob with the runtime torch-distributed."""
    only(spec, "runtimeRef", "trainer", "runtimePatches")
    only(spec["trainer"], "numNodes", "numProcPerNode", "command")
    assert spec["runtimeRef"]["name"] == "torch-distributed"
    nodes = spec["trainer"]["numNodes"]
    variables = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(spec["trainer"]["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    env = [{"name": key, "value": value} for key, value in variables.items()]
    env.append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}})
    container = {"name": "node", "command": spec["trainer"]["command"], "env": env}
    job = {"completions": nodes, "parallelism": nodes, "template": {"spec": {"containers": [container]}}}
    merged = _merged(_TORCH_DISTRIBUTED, job)
    for patch in spec["runtimePatches"]:
        (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        assert replicated["name"] == "node"
        merged = _merged(merged, replicated["template"]["spec"])
    return JobSet(cluster, name, {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": merged}}]})


def _merged(old: Any, new: Any) -> Any:
    """Return `old` with the values of `new`; entries of lists are the same if they have the same name."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list) and all("name" in entry for entry in (*old, *new)):
        by_name = {entry["name"]: entry for entry in old}
        return list((by_name | {entry["name"]: _merged(by_name.get(entry["name"]), entry) for entry in new}).values())
    return new


class Cluster:
    """The objects of a cluster by their names. Each new pod takes the next of `networks` (namespace, address)."""

    def __init__(self, node: Node, networks: Sequence[tuple[str, str]]) -> None:
        self.node, self.numbers = node, count()
        self.networks = iter(networks)
        self.services: dict[str, dict[str, str]] = {}  # name -> labels of its pods
        self.workloads: dict[str, Job | JobSet] = {}
        self.pods: list[Pod] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods:
            pod.end()

    def apply(self, manifest: str) -> None:
        """Create the objects of `manifest`."""
        for document in yaml.safe_load_all(manifest):
            kind, name = document["kind"], document["metadata"]["name"]
            if kind == "ConfigMap":
                self.node.config_maps[name] = document["data"]
            elif kind == "Service":
                only(document["spec"], "clusterIP", "publishNotReadyAddresses", "selector")
                assert document["spec"]["clusterIP"] == "None"
                assert document["spec"]["publishNotReadyAddresses"], "else names of pods appear when they are ready"
                self.services[name] = document["spec"]["selector"]
            else:
                make = {"Job": Job, "JobSet": JobSet, "TrainJob": train_job}[kind]
                self.workloads[name] = make(self, name, document["spec"])

    def start(self, spec: Mapping[str, Any], metadata: Mapping[str, Any], hostname: str) -> Pod:
        """Start a pod, for a Job."""
        network, address = next(self.networks)
        pod = Pod(self.node, spec, metadata, hostname, address, network)
        self.pods.append(pod)
        self._publish_names()
        return pod

    def tick(self) -> None:
        """Let all controllers do what there is to do now."""
        before = [pod for workload in self.workloads.values() for pod in workload.active.values()]
        for workload in self.workloads.values():
            workload.tick()
        if before != [pod for workload in self.workloads.values() for pod in workload.active.values()]:
            self._publish_names()

    def wait_for(self, condition: Callable[[], Any], seconds: float = 480.0, pause: float = 0.02) -> Any:
        """Run the cluster until `condition()`, which is asked after each `pause`, is true, and return its value."""
        until = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < until, "\n".join(pod.log.read_text() for pod in self.pods)
            self.tick()
            time.sleep(pause)
        return value

    def drain(self, pod: Pod) -> None:
        """Evict `pod`, as `kubectl drain` and a preemption do."""
        pod.conditions.add("DisruptionTarget")
        pod.delete()

    def kubectl(self, words: Sequence[str], *, may_fail: bool = False) -> str:
        """Answer a command of kubectl as its API server would."""
        if list(words[:3]) == ["kubectl", "apply", "-f"]:
            self.apply(Path(words[3]).read_text())
            return ""
        verb, _, name, *_ = words[1:]
        if name not in self.workloads:
            assert may_fail, f"{name} does not exist"
            return ""
        workload = self.workloads[name]
        if verb == "get":
            conditions = [{"type": workload.condition, "status": "True"}] if workload.condition else []
            number = len(workload.active)
            return json.dumps({"status": {"conditions": conditions, "active": number, "ready": number}})
        if verb == "patch":
            assert json.loads(words[-1]) == {"spec": {"suspend": True}}
            workload.suspended = True
        elif verb == "delete":
            for pod in workload.active.values():
                pod.delete()
            self.wait_for(lambda: all(pod.exit_code is not None for pod in workload.active.values()))
            del self.workloads[name]
        return ""

    def _publish_names(self) -> None:
        """Name the pods of each headless Service that have it as their subdomain, as the DNS of a cluster does."""
        pods = [pod for pod in self.pods if pod.exit_code is None]
        lines = [
            f"{pod.address} {name} {name}.{NAMESPACE}.svc.cluster.local"
            for pod in pods
            for service, selector in self.services.items()
            if pod.subdomain == service and selector.items() <= pod.metadata["labels"].items()
            for name in [f"{pod.hostname}.{service}"]
        ]
        for pod in pods:
            pod.know_hosts(lines)
