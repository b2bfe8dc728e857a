"""Kubernetes: an Indexed Job, a JobSet or a TrainJob, and kubectl.

Each pod is a node: one container runs `kumi train` and starts the ranks of its devices. Node 0 is pod 0, whose name
the headless Service resolves. A pod that fails is started again under its number, unless its exit code says that it
would fail again. This module is a `kumi.launch.cluster_launchers.ClusterLauncher`. `Noted` is a value with a comment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kumi.errors import TERMINATED, ConfigError
from kumi.launch.cluster_command import run_cluster_command
from kumi.launch.launch_job import HEAD_PORT, HOPELESS_CODES, LaunchJob, check_run_folder_outlives_node, placeholder
from kumi.launch.launch_record import JobState, LaunchRecord
from kumi.launch.manifest_text import Noted, manifest_text
from kumi.units import parse_bytes

name = "kubernetes"
shares_files = False
file_name = "manifest.yaml"

# Folder of the run file in the container.
_RUN_FOLDER = "/run/kumi"
# Path of a pod's number in the downward API.
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# etcd, in which a ConfigMap lies, takes at most 1 MiB with everything around it.
_LARGEST_RUN_FILE = 900_000
# Words by which the commands of kubectl name the objects.
_RESOURCES = {"job": "job", "jobset": "jobset", "trainjob": "trainjob"}
# Conditions of a job that tell its state.
_STATES = ("Complete", "Completed", "Failed", "Suspended")


def text(job: LaunchJob) -> str:
    """Return the manifests of `job`: a ConfigMap with the run file, a Service unless the API makes one, the job."""
    api = job.launch.kubernetes.api
    workload = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[api](job)
    service = [_service(job)] if api == "job" else []
    head = f"{job.written_by}\nPaths in the run file are paths in the container. Submit: kubectl apply -f {file_name}"
    return manifest_text([_config_map(job), *service, workload], head)


def check(job: LaunchJob, *, submit: bool) -> None:
    """Raise ConfigError if a manifest would contain secrets, cannot hold the settings, or would lose the run folder."""
    launch = job.launch
    for key, value in (("env", launch.env), ("env_file", launch.env_file)):
        if value:
            raise ConfigError(
                f"launch.{key} would write its values into a manifest that others can read; make a Secret (kubectl "
                f"create secret generic NAME --from-env-file=FILE) and set launch.kubernetes.secrets = ['NAME']"
            )
    if launch.kubernetes.api == "trainjob" and launch.kubernetes.secrets:
        raise ConfigError(
            "launch.kubernetes.secrets: a TrainJob takes Secrets from its runtime only; add them to the runtime "
            f"{launch.kubernetes.runtime!r}, or set launch.kubernetes.api = 'job'"
        )
    if len(job.run_text.encode()) > _LARGEST_RUN_FILE:
        raise ConfigError(
            f"the run file has more than {_LARGEST_RUN_FILE} bytes, which no ConfigMap holds; put long lists into "
            f"files of their own"
        )
    if launch.kubernetes.api != "trainjob":  # the runtime of a TrainJob may have volumes of its own
        check_run_folder_outlives_node(job, launch.kubernetes.volumes, "launch.kubernetes.volumes")


def submit_command(file: str) -> tuple[str, ...]:
    """Return the command that submits the manifests in `file`."""
    return ("kubectl", "apply", "-f", file)


def submit(job: LaunchJob, file: Path) -> str:
    """Apply the manifests in `file` and return the id, KIND.NAME or KIND.NAMESPACE.NAME.

    A finished job of that name is deleted, since its pods never start again. Raise ConfigError if one is active.
    """
    section = job.launch.kubernetes
    parts = [section.api, *([section.namespace] if section.namespace else []), job.host_name]
    record = LaunchRecord(name, ".".join(parts), file.parent, "")
    before = state(record)
    if before.word in ("running", "waiting"):
        raise ConfigError(f"{section.api} {job.host_name} is {before.word}; stop it with kumi stop, or see kumi status")
    if before.word != "unknown":
        run_cluster_command(("kubectl", "delete", *_target(record), "--wait=true"))
    run_cluster_command(submit_command(str(file)))
    return record.id


def state(record: LaunchRecord) -> JobState:
    """Return the state of the job: running, waiting, complete, completed, failed, suspended or unknown."""
    answer = run_cluster_command(("kubectl", "get", *_target(record), "-o", "json"), may_fail=True)
    if not answer:
        return JobState("unknown", "the cluster has no such job, or does not answer")
    status = json.loads(answer).get("status") or {}
    for entry in status.get("conditions") or []:
        if entry.get("status") == "True" and entry.get("type") in _STATES:
            return JobState(entry["type"].lower(), str(entry.get("message") or entry.get("reason") or ""))
    active, ready, failed = (status.get(key) or 0 for key in ("active", "ready", "failed"))
    if record.id.startswith("job."):
        return JobState("running" if active else "waiting", f"{ready} of {active} pods ready, {failed} failed so far")
    return JobState("running", "")


def stop(record: LaunchRecord, out: Path, *, now: bool) -> str:
    """Suspend the job, which lets its pods save within their grace period, or delete it `now`."""
    if now:
        run_cluster_command(("kubectl", "delete", *_target(record), "--grace-period=1"))
        return f"{record.id} is deleted; the last checkpoint stays"
    run_cluster_command(("kubectl", "patch", *_target(record), "--type=merge", "-p", '{"spec":{"suspend":true}}'))
    return f"{record.id} is suspended: its pods save and end; kumi launch --submit continues the run"


def log_command(record: LaunchRecord, lines: int, *, follow: bool) -> tuple[str, ...]:
    """Return the command that shows the last `lines` of the output of node 0."""
    api, namespace, host_name = _parts(record)
    labels = {
        "job": f"job-name={host_name},batch.kubernetes.io/job-completion-index=0",
        "jobset": f"jobset.sigs.k8s.io/jobset-name={host_name},batch.kubernetes.io/job-completion-index=0",
        "trainjob": f"jobset.sigs.k8s.io/jobset-name={host_name},batch.kubernetes.io/job-completion-index=0",
    }
    options = [f"--tail={lines}", *(["--follow"] if follow else []), *_namespace_option(namespace)]
    return ("kubectl", "logs", "-l", labels[api], *options)


def _parts(record: LaunchRecord) -> tuple[str, str, str]:
    api, *namespace, host_name = record.id.split(".")
    return api, namespace[0] if namespace else "", host_name


def _target(record: LaunchRecord) -> tuple[str, ...]:
    api, namespace, host_name = _parts(record)
    return (_RESOURCES[api], host_name, *_namespace_option(namespace))


def _namespace_option(namespace: str) -> tuple[str, ...]:
    return (f"--namespace={namespace}",) if namespace else ()


def _metadata(job: LaunchJob) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "kumi"}
    return {"name": job.host_name, "namespace": job.launch.kubernetes.namespace, "labels": labels}


def _config_map(job: LaunchJob) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "data": {"run.toml": job.run_text}}


def _service(job: LaunchJob) -> dict[str, Any]:
    """Return the Service by which the name of each pod resolves."""
    spec = {
        "clusterIP": Noted("None", "Headless: names of pods instead of one address for all."),
        "publishNotReadyAddresses": Noted(True, "The name of node 0 must resolve before its pod is ready."),
        "selector": {"job-name": job.host_name},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job(job: LaunchJob) -> dict[str, Any]:
    """Return the Indexed Job, one pod a node."""
    spec = _indexed_job(job, f"{job.host_name}-0.{job.host_name}", {"job-name": job.host_name})
    spec["template"]["spec"]["subdomain"] = job.host_name
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}


def _indexed_job(job: LaunchJob, head: str, peers: Mapping[str, str]) -> dict[str, Any]:
    """Return the spec of an Indexed Job. `head`: the host name of node 0. `peers`: labels of the pods of all nodes."""
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimitPerIndex": Noted(
            job.launch.requeues, "Times that a node that fails is started again under its number; then the job fails."
        ),
        "maxFailedIndexes": 0,
        "podReplacementPolicy": Noted("Failed", "No second pod of a node while the first one still saves."),
        "activeDeadlineSeconds": job.time_limit,
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/managed-by": "kumi"}},
            "spec": _pod(job, _place(job, head), peers),
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    """Return the rules that say which ends of a pod count as a failure, and which fail the whole job."""
    hopeless = {"containerName": "kumi", "operator": "In", "values": list(HOPELESS_CODES)}
    return [
        {
            "action": Noted("Ignore", "Preemption, drain, eviction: does not count."),
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": Noted("Ignore", "Saved because a pod was asked to end, this one or another: does not count."),
            "onExitCodes": {"containerName": "kumi", "operator": "In", "values": [TERMINATED]},
        },
        {
            "action": Noted("FailJob", "Refused, bad data, does not fit, diverged: would fail again."),
            "onExitCodes": hopeless,
        },
        {"action": "Count", "onExitCodes": {"containerName": "kumi", "operator": "NotIn", "values": [0]}},
    ]


def _place(job: LaunchJob, head: str) -> list[dict[str, Any]]:
    """Return the variables by which a pod learns its place."""
    return [
        {"name": "KUMI_HEAD", "value": f"{head}:{HEAD_PORT}"},
        {"name": "KUMI_NODES", "value": str(job.nodes)},
        {"name": "KUMI_NODE", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
    ]


def _jobset(job: LaunchJob) -> dict[str, Any]:
    """Return the JobSet, whose controller makes the Service."""
    head = f"{job.host_name}-node-0-0.{job.host_name}"
    child = _indexed_job(job, head, {"jobset.sigs.k8s.io/jobset-name": job.host_name})
    rules = [
        {
            "name": "hopeless",
            "action": Noted("FailJobSet", "A pod ended with a code after which it would fail again."),
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    spec = {
        "network": {
            "enableDNSHostnames": True,
            "publishNotReadyAddresses": Noted(True, "The name of node 0 must resolve before its pod is ready."),
        },
        "failurePolicy": {"maxRestarts": job.launch.requeues, "rules": rules},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": child}}],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(job), "spec": spec}


def _trainjob(job: LaunchJob) -> dict[str, Any]:
    """Return the TrainJob. Its runtime has the pod; volumes and labels of nodes are patched into it."""
    section = job.launch.kubernetes
    places = "export KUMI_HEAD=$PET_MASTER_ADDR:$PET_MASTER_PORT KUMI_NODES=$PET_NNODES KUMI_NODE=$PET_NODE_RANK"
    command = ["bash", "-c", f'{places}; exec "$@"', "kumi-node", *_command(job)]
    trainer = {
        "numNodes": job.nodes,
        "numProcPerNode": Noted(1, "One kumi train a node, which starts the ranks of its devices."),
        "image": _image(job),
        "command": _literal(command),
        "resourcesPerNode": _resources(job),
    }
    patch = {
        "nodeSelector": dict(section.node_selector),
        "terminationGracePeriodSeconds": Noted(job.save_seconds, "Time in which a pod that must end saves."),
        "securityContext": _user(job),
        "containers": [{"name": "node", "securityContext": _security(job), "volumeMounts": _mounts(job)}],
        "volumes": _volumes(job),
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": section.runtime},
        "activeDeadlineSeconds": job.time_limit,
        "trainer": trainer,
        "runtimePatches": [
            {
                "manager": "kumi.dev/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
            }
        ],
    }
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": _metadata(job), "spec": spec}


def _pod(job: LaunchJob, place: list[dict[str, Any]], peers: Mapping[str, str]) -> dict[str, Any]:
    """Return the spec of a pod, which is a node."""
    section = job.launch.kubernetes
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": dict(peers)}}
    container = {
        "name": "kumi",
        "image": _image(job),
        "command": _literal(_command(job)),
        "env": place,
        "envFrom": [{"secretRef": {"name": secret}} for secret in section.secrets],
        "resources": _resources(job),
        "securityContext": _security(job),
        "volumeMounts": _mounts(job),
    }
    return {
        "restartPolicy": Noted("Never", "The Job starts a new pod, and podFailurePolicy needs it so."),
        "terminationGracePeriodSeconds": Noted(job.save_seconds, "Time in which a pod that must end saves."),
        "nodeSelector": dict(section.node_selector),
        "affinity": Noted(
            {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}, "One pod a machine."
        ),
        "securityContext": _user(job),
        "containers": [container],
        "volumes": _volumes(job),
    }


def _image(job: LaunchJob) -> str | Noted:
    """Return the image of the container, or a placeholder for it."""
    image = job.launch.kubernetes.image
    if image is not None:
        return image
    return Noted(placeholder("IMAGE"), "An image with kumi in it: launch.kubernetes.image")


def _command(job: LaunchJob) -> list[str]:
    """Return the command of the container, after the lines of launch.setup."""
    command = list(job.train_command(f"{_RUN_FOLDER}/run.toml"))
    if not job.launch.setup:
        return command
    return ["bash", "-c", " && ".join([*job.launch.setup, 'exec "$@"']), "kumi-node", *command]


def _literal(words: list[str]) -> list[str]:
    """Return `words` with each $ doubled: Kubernetes replaces $$ by $, but $(NAME) by the value of a variable."""
    return [word.replace("$", "$$") for word in words]


def _resources(job: LaunchJob) -> dict[str, Any]:
    """Return the devices, memory and CPUs of a pod."""
    section, limits = job.launch.kubernetes, dict[str, Any]()
    if job.uses_gpus:
        limits["amd.com/gpu" if job.has_amd_gpus else "nvidia.com/gpu"] = job.devices_per_node
    limits |= section.resources
    limits |= {} if job.memory is None else {"memory": str(job.memory)}
    requests = {} if job.launch.cpus is None else {"cpu": str(job.launch.cpus)}
    return {"limits": limits, "requests": requests}


def _security(job: LaunchJob) -> Noted | None:
    """Return the right to pin memory, for a pod with RDMA devices (launch.kubernetes.resources); else None."""
    if not job.launch.kubernetes.resources:
        return None
    note = "RDMA pins memory. This lets root do so; other users need LimitMEMLOCK of the container runtime."
    return Noted({"capabilities": {"add": ["IPC_LOCK"]}}, note)


def _user(job: LaunchJob) -> dict[str, Any]:
    """Return the user and the group of the pod; empty without launch.kubernetes.user and group."""
    section = job.launch.kubernetes
    context: dict[str, Any] = {"runAsUser": section.user, "runAsGroup": section.group, "fsGroup": section.group}
    if section.group is not None:
        context["fsGroupChangePolicy"] = Noted("OnRootMismatch", "Else each start would change the group of all files.")
    return context


def _mounts(job: LaunchJob) -> list[dict[str, Any]]:
    """Return where the container sees the volumes of `_volumes`."""
    volumes = [
        {"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(job.launch.kubernetes.volumes)
    ]
    return [{"name": "run", "mountPath": _RUN_FOLDER}, *volumes, {"name": "shm", "mountPath": "/dev/shm"}]


def _volumes(job: LaunchJob) -> list[dict[str, Any]]:
    """Return the volumes of a pod: the run file, launch.kubernetes.volumes, and shared memory."""
    section = job.launch.kubernetes
    claims = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(section.volumes.values())
    ]
    size = None if section.shm is None else str(parse_bytes(section.shm))
    memory = Noted({"medium": "Memory", "sizeLimit": size}, "Ranks share tensors here; 64 MiB without this.")
    return [{"name": "run", "configMap": {"name": job.host_name}}, *claims, {"name": "shm", "emptyDir": memory}]
