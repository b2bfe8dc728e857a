"""From what a run file says to what will run: specs, with the layout chosen and everything derived."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.balance import Balance, choose_balance
from kumi.config.jobs import comm, plan_input
from kumi.config.model import local_folder, read_hf_config, snapshot
from kumi.config.numerics import spelled_out
from kumi.config.schema import RunConfig
from kumi.config.stored import in_force
from kumi.errors import ConfigError, LayoutError
from kumi.plan.choose import choose_layout
from kumi.plan.types import Estimate, MemoryEstimate
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.comm import Comm, refusals
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import Numerics
from kumi.spec.optim import Optim
from kumi.spec.precision import Precision


@dataclass(frozen=True)
class ResolvedRun:
    """All that the trainer reads: a pure function of the run file and the machines, and on a CPU of what was measured
    there, in which the ranks follow rank 0. So every rank agrees.

    `hf_config` is the model's config.json as given; `source` the folder it came from, None for an inline config.
    `snapshots` are the copies of repositories on the hub, by the run-file key that named them; `source` is the folder
    of such a copy then, in which weights are only once they have been fetched.
    """

    config: RunConfig
    hf_config: dict[str, Any]
    source: Path | None
    job: Job
    estimate: Estimate
    snapshots: Mapping[str, hub.Snapshot] = field(default_factory=dict)

    @property
    def model(self) -> ModelSpec:
        return self.job.model

    @property
    def base(self) -> ModelSpec:
        """The model without adapters, which is what files hold."""
        return replace(self.job.model, lora=None)

    @property
    def cluster(self) -> ClusterSpec:
        return self.job.cluster

    @property
    def batch(self) -> BatchSpec:
        return self.job.batch

    @property
    def precision(self) -> Precision:
        return self.job.precision

    @property
    def optim(self) -> Optim:
        return self.job.optim

    @property
    def numerics(self) -> Numerics | None:
        """How a CPU computes; None where that is still to be measured."""
        return self.job.numerics

    @property
    def layout(self) -> Layout:
        return self.estimate.layout

    @property
    def balance(self) -> Balance:
        """How routed experts are kept equally busy."""
        return choose_balance(self.model, self.config.model)

    @property
    def comm(self) -> Comm:
        """How gradients and parameters travel."""
        return comm(self.config)

    @property
    def memory(self) -> MemoryEstimate:
        """What the fullest rank holds."""
        return max(self.estimate.memory, key=lambda one: one.total)

    @property
    def step_seconds(self) -> float | None:
        """Estimated seconds of a step; None where the device's speed is not known."""
        known = self.cluster.device.peak_flops(self.precision.matmul_dtype)
        return self.estimate.step_seconds if known else None

    @property
    def out(self) -> Path:
        return Path(os.path.expanduser(self.config.train.out))


def resolve(config: RunConfig) -> ResolvedRun:
    """What `config` will run, with what is in force in its run folder where a run has begun there.

    Raises ConfigError, ModelError, LayoutError or FitError, each with its reason.
    """
    config = in_force(config)
    snapshots = _snapshots(config)
    source = _source(config.model.source, snapshots)
    hf_config = read_hf_config(config.model, source)
    if config.train.trace_step > config.train.steps:
        raise ConfigError(
            f"train.trace_step={config.train.trace_step} comes after the last of train.steps={config.train.steps}; "
            f"use 1 to {config.train.steps}, or 0 to record none"
        )
    asked = plan_input(config, hf_config)
    choose_balance(asked.job.model, config.model)
    estimate = choose_layout(asked.job, asked.pinned, asked.grow)
    run = ResolvedRun(spelled_out(config, asked.job), hf_config, source, asked.job, estimate, snapshots)
    wrong = list(refusals(run.comm, run.layout, run.batch.microbatches(run.layout), run.cluster))
    if run.model.lora is not None and config.comm.async_tp:
        wrong.append("comm.async_tp=true with [lora]: regions with adapters gather before they multiply; set it false")
    if wrong:
        raise LayoutError("; ".join(wrong))
    return run


def named(config: RunConfig) -> dict[str, str]:
    """The keys of a run file that may name a repository on the hub, and what they name."""
    sources = {"model.source": config.model.source, "data.tokenizer": config.data.tokenizer}
    return {key: source for key, source in sources.items() if isinstance(source, str)}


def _snapshots(config: RunConfig) -> dict[str, hub.Snapshot]:
    """The hub's copies of what is no folder here."""
    out = Path(os.path.expanduser(config.train.out))
    found = {key: snapshot(source, key, out) for key, source in named(config).items()}
    return {key: one for key, one in found.items() if one is not None}


def _source(source: str | None, snapshots: Mapping[str, hub.Snapshot]) -> Path | None:
    """The model's folder; None where its config is inline."""
    if "model.source" in snapshots:
        return snapshots["model.source"].folder
    return None if source is None else local_folder(source)
