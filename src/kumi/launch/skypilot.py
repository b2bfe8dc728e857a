"""SkyPilot: a task file, started as a managed job, which SkyPilot starts again on other machines if it loses some.

This module is a `kumi.launch.cluster_launchers.ClusterLauncher`. `Noted` is a value with a comment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from kumi import __version__
from kumi.errors import ConfigError
from kumi.launch.cluster_command import run_cluster_command
from kumi.launch.launch_job import (
    HEAD_PORT,
    LaunchJob,
    check_env_file,
    check_run_folder_outlives_node,
    is_below,
    placeholder,
)
from kumi.launch.launch_record import JobState, LaunchRecord
from kumi.launch.manifest_text import NULL, Noted, manifest_text

name = "skypilot"
shares_files = False
file_name = "task.yaml"

# Part of a device's name -> SkyPilot's name of the accelerator. The first match counts.
_ACCELERATORS = (
    ("GH200", "GH200"),
    ("GB200", "GB200"),
    ("GB300", "GB300"),
    ("B200", "B200"),
    ("B300", "B300"),
    ("H200", "H200"),
    ("H100", "H100"),
    ("A100-SXM4-40GB", "A100"),
    ("A100", "A100-80GB"),
    ("L40S", "L40S"),
    ("L4", "L4"),
    ("V100", "V100-32GB"),
    ("MI300X", "MI300X"),
    ("4090", "RTX4090"),
)
# SkyPilot replaces $NAME and ${NAME} in paths, if NAME is a secret of the task or of its command line.
_REPLACED = re.compile(r"\$(?:\{[A-Za-z_]\w*\}?|[A-Za-z_]\w*)", re.ASCII)
# Exit codes after which SkyPilot starts the job again: a node was lost, or it was asked to save.
_RECOVERED_CODES = (7, 75)


def text(job: LaunchJob) -> str:
    """Return the task of `job`."""
    launch, section = job.launch, job.launch.skypilot
    head = f"{job.written_by}\nSubmit: {shlex.join(submit_command(file_name, launch.env, launch.env_file))}"
    head += "\nSkyPilot jobs have no time limit: launch.time_limit has no effect." if launch.time_limit else ""
    resources = {
        "infra": section.infra,
        "accelerators": _accelerators(job),
        "cpus": None if launch.cpus is None else f"{launch.cpus}+",
        "memory": None if job.memory is None else f"{-(-job.memory // 10**9)}+",
        "image_id": section.image,
        "use_spot": Noted(True, "Spot machines may be taken away; the run then goes on from its last checkpoint.")
        if section.spot
        else None,
        "job_recovery": Noted(
            {
                "strategy": "FAILOVER",
                "max_restarts_on_errors": launch.requeues,
                "recover_on_exit_codes": list(_RECOVERED_CODES),
            },
            "7: a node was lost. 75: saved because it was asked to. Other codes would come again.",
        ),
    }
    buckets = {path: source for path, source in section.mounts.items() if "://" in source}
    task = {
        "name": job.host_name,
        "num_nodes": job.nodes,
        "resources": resources,
        "workdir": Noted(job.folder, "This folder is copied to every machine."),
        "file_mounts": {path: {"source": source, "mode": "MOUNT"} for path, source in buckets.items()},
        "volumes": {path: source for path, source in section.mounts.items() if path not in buckets},
        "secrets": Noted(
            dict.fromkeys(launch.env, NULL), "By name only: --secret takes the values from the submitting shell."
        ),
        "setup": Noted(f"command -v kumi > /dev/null || pip install kumi=={__version__}\n", "On every machine, once."),
        "run": _script(job),
    }
    return manifest_text([task], head)


def check(job: LaunchJob, *, submit: bool) -> None:
    """Raise ConfigError if a recovered job would lack its checkpoints or data, or if secrets are missing or shown."""
    launch = job.launch
    mounts = ", ".join(launch.skypilot.mounts) or "none"
    check_run_folder_outlives_node(job, launch.skypilot.mounts, "launch.skypilot.mounts")
    cache = job.data_cache
    # Data that is prepared here already is copied to all machines, with the working directory.
    prepared = cache is not None and Path(job.folder, cache).is_dir() and not Path(cache).is_absolute()
    if job.nodes > 1 and cache is not None and not prepared and not is_below(cache, launch.skypilot.mounts):
        raise ConfigError(
            f"data.cache={cache!r} is in no folder of launch.skypilot.mounts ({mounts}), so the other machines would "
            f"not see the data that the first one prepares; leave data.cache out, put it below a mounted folder, or "
            f"prepare the data here with kumi data prepare"
        )
    for path in (job.folder, *launch.skypilot.mounts, *launch.skypilot.mounts.values()):
        if (variable := _REPLACED.search(path)) is not None:
            raise ConfigError(
                f"the path {path!r}: SkyPilot would replace {variable[0]} by the value of the secret of that name, and "
                f"show it; rename the folder or bucket"
            )
    if launch.env_file is not None:
        check_env_file(launch.env_file, required=submit)
    missing = [variable for variable in launch.env if variable not in os.environ]
    if submit and missing:
        raise ConfigError(
            f"launch.env names {', '.join(missing)}, which this shell does not set; export it, or put it into the file "
            f"of launch.env_file"
        )


def submit_command(file: str, env: tuple[str, ...] = (), env_file: str | None = None) -> tuple[str, ...]:
    """Return the command that submits the task `file`, with the names of its secrets."""
    secrets = [word for variable in env for word in ("--secret", variable)]
    secrets += [] if env_file is None else ["--secret-file", os.path.expanduser(env_file)]
    return ("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, file)


def submit(job: LaunchJob, file: Path) -> str:
    """Submit the task `file` and return its name, by which SkyPilot finds it."""
    run_cluster_command(submit_command(str(file), job.launch.env, job.launch.env_file))
    return job.host_name


def state(record: LaunchRecord) -> JobState:
    """Return the state of the newest managed job of the name."""
    answer = run_cluster_command(("sky", "jobs", "queue", "--all", "--output", "json"), may_fail=True)
    try:
        jobs = [job for job in json.loads(answer or "[]") if job.get("job_name") == record.id]
    except (ValueError, AttributeError):
        jobs = []
    if not jobs:
        return JobState("unknown", "SkyPilot lists no such job, or does not answer")
    newest = max(jobs, key=lambda job: int(job.get("job_id") or 0))
    recoveries = newest.get("recovery_count") or 0
    return JobState(str(newest.get("status", "unknown")).lower(), f"recovered {recoveries} times")


def stop(record: LaunchRecord, out: Path, *, now: bool) -> str:
    """Cancel the job `now`. Raise ConfigError otherwise: SkyPilot cannot ask a job to save."""
    if not now:
        raise ConfigError(
            f"SkyPilot cannot ask a job to save; use kumi stop --now, which loses the steps since the last checkpoint, "
            f"or write {out}/stop on a machine of the job: sky jobs logs {record.id} shows them"
        )
    run_cluster_command(("sky", "jobs", "cancel", "--yes", "--name", record.id))
    return f"SkyPilot job {record.id} is cancelled; the last checkpoint stays"


def log_command(record: LaunchRecord, lines: int, *, follow: bool) -> tuple[str, ...]:
    """Return the command that shows the last `lines` of the job's output."""
    return ("sky", "jobs", "logs", "--name", record.id, "--tail", str(lines), "--follow" if follow else "--no-follow")


def _accelerators(job: LaunchJob) -> str | Noted | None:
    """Return SkyPilot's name and number of a node's GPUs, or a placeholder for an unknown GPU; None without GPUs."""
    if not job.uses_gpus:
        return None
    chosen = job.launch.skypilot.accelerators
    if chosen is None:
        chosen = next((sky for part, sky in _ACCELERATORS if part in job.device), None)
    if chosen is not None:
        return f"{chosen}:{job.devices_per_node}"
    note = f"SkyPilot's name of {job.device!a}: launch.skypilot.accelerators; sky show-gpus lists them"
    return Noted(f"{placeholder('ACCELERATOR')}:{job.devices_per_node}", note)


def _script(job: LaunchJob) -> str:
    """Return the commands of each machine."""
    lines = [
        *job.launch.setup,
        'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        'case $head in *:*) head="[$head]" ;; esac   # an IPv6 address',
        f'export KUMI_HEAD="$head:{HEAD_PORT}"',
        'export KUMI_NODES="$SKYPILOT_NUM_NODES" KUMI_NODE="$SKYPILOT_NODE_RANK"',
        f"exec {shlex.join(job.command)}",
    ]
    return "".join(f"{line}\n" for line in lines)
