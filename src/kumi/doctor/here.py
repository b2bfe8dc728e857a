"""What the checks of one node know: its place, the run, its devices, and the ways to reach the other nodes."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kumi.config import RunConfig
from kumi.config.cluster_source import cluster_spec
from kumi.config.jobs import plan_input
from kumi.config.model_source import fetch_snapshots, read_hf_config, source_folder
from kumi.config.stored_config import run_folder
from kumi.doctor.device_workers import DeviceWorkers
from kumi.doctor.meeting import Meeting
from kumi.errors import KumiError
from kumi.remote.addresses import is_url
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.sharding import checkpoint_bytes
from kumi.storage.folders import checkpoint_root, list_complete

_SMI_SECONDS = 15.0


@dataclass(frozen=True)
class RunNeeds:
    """What a run needs from its nodes.

    `out`: the run folder. `checkpoint_space`: free bytes that its further checkpoints need. `digests`: a hash of the
    value of each key of the run file.
    `problem`: why this node cannot describe the run, or "". `url`: train.out if it is a URL, whose local copy is `out`.
    """

    out: Path
    checkpoint_space: int
    digests: Mapping[str, str]
    problem: str = ""
    url: str = ""


def run_needs(config: RunConfig, job: Job | None = None) -> tuple[ClusterSpec, RunNeeds]:
    """Return the machines of the run of `config`, and what the run needs from them.

    `job`: the job of `config`, if the caller has it already.

    An error of the model's description becomes `RunNeeds.problem`, so that the other nodes hear of it.
    """
    out = run_folder(config)
    assert out is not None, "a run has a folder"
    url = config.train.out if is_url(config.train.out) else ""
    try:
        job = _job(config) if job is None else job
        return job.cluster, RunNeeds(out, checkpoint_space(config, job, out), _digests(config), url=url)
    except KumiError as error:
        return cluster_spec(config.cluster), RunNeeds(out, 0, _digests(config), str(error), url)


def _job(config: RunConfig) -> Job:
    """Return the job of `config`, without the search for a layout. Raise ConfigError or ModelError."""
    source = source_folder(config.model.source, fetch_snapshots(config))
    return plan_input(config, read_hf_config(config.model, source)).job


def checkpoint_space(config: RunConfig, job: Job, out: Path) -> int:
    """Return the free bytes that a run in `out` needs for the checkpoints that it does not have yet."""
    missing = max(1, config.checkpoints_at_most - len(list_complete(checkpoint_root(out))))
    return sum(checkpoint_bytes(model, job.precision, job.optim) for model in job.models) * missing


def _digests(config: RunConfig) -> dict[str, str]:
    """Return a hash of the value of each key of the run file, by dotted key."""
    tree = config.model_dump(mode="json")
    return {
        key: hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()
        for key, value in _leaves(tree)
    }


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class Devices:
    """The devices that this process examines, and those of its whole machine in the run.

    `kind`: cpu or cuda. `count`: devices of this process. `first`: the number of the first one on this machine.
    `per_node`: devices of the machine.
    """

    kind: str
    count: int
    first: int = 0
    per_node: int = 1


@dataclass
class Here:
    """The context of the checks on one node. `run` is None if no run file is given."""

    meeting: Meeting
    workers: DeviceWorkers
    devices: Devices
    environ: Mapping[str, str]
    run: RunNeeds | None = None
    noted: dict[str, Any] = field(default_factory=dict)  # values that one check measures for another

    @property
    def several_nodes(self) -> bool:
        return self.meeting.seat.nodes > 1

    @property
    def ranks(self) -> int:
        """The ranks of the run on all nodes."""
        nodes = self.meeting.seat.nodes
        return nodes if self.meeting.seat.noun == "rank" else nodes * self.devices.per_node

    @cached_property
    def smi(self) -> str:
        """The result of `read_smi`. Read once."""
        return read_smi()


def read_smi() -> str:
    """Return the XML of `nvidia-smi -q -x`; "" if this machine has no such program.

    Raise OSError if the program fails or hangs.
    """
    try:
        ended = subprocess.run(
            ["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=_SMI_SECONDS, errors="replace"
        )
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired:
        raise OSError(f"nvidia-smi did not answer within {_SMI_SECONDS:.0f} s") from None
    if ended.returncode:
        raise OSError(f"nvidia-smi ended with code {ended.returncode}: {ended.stdout.strip()[:200]}")
    return ended.stdout
