"""From what a run file says to what will run: specs, with the layout chosen and everything derived."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.balance_section import Balance, choose_balance
from kumi.config.decide_layout import decide
from kumi.config.jobs import comm, plan_input
from kumi.config.model_source import fetch_snapshots, model_source, read_hf_config
from kumi.config.numerics import spelled_out
from kumi.config.pinned_run import pinned_to
from kumi.config.run_plan import RunPlan, estimate_figures, made_for
from kumi.config.schema import LayoutSection, RunConfig
from kumi.config.stored_config import Begun, in_force, read_begun
from kumi.errors import ConfigError, LayoutError
from kumi.plan.estimates import Estimate, MemoryEstimate
from kumi.plan.search.candidates import Pins
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.comm import Comm, refusals
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import Numerics
from kumi.spec.optim import Optim
from kumi.spec.precision import Precision
from kumi.spec.saved_tensors import model_digest


@dataclass(frozen=True)
class ResolvedRun:
    """All that the trainer reads.

    `config`: the run file with every choice spelled out, as the run folder keeps it. `hf_config`: the model's
    config.json as given. `source`: the folder it came from, None for an inline config. `snapshots`: copies of
    repositories on the hub, by the run-file key that named them; `source` is the folder of such a copy then, in which
    weights are only once they have been fetched. `pinned`: the layout fields that the run file pins. `change`: how the
    layout differs from the one before and why, or "". `begun`: what the run folder said; None for a new run.
    """

    config: RunConfig
    hf_config: dict[str, Any]
    source: Path | None
    job: Job
    estimate: Estimate
    snapshots: Mapping[str, hub.Snapshot] = field(default_factory=dict)
    pinned: Pins = field(default_factory=dict)
    change: str = ""
    begun: Begun | None = None

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

    @property
    def plan(self) -> RunPlan:
        """What the run folder keeps as plan.json."""
        figures = estimate_figures(self.estimate, speed_known=self.step_seconds is not None)
        return RunPlan(self.layout, self.pinned, made_for(self.job), figures)

    @property
    def identity(self) -> dict[str, str]:
        """What must be the same on all ranks, by the section of the run file that decides it. Paths may differ."""
        config, train = self.config, self.config.train
        parts: dict[str, Any] = {
            "model": (model_digest(self.model), config.model.init, self.balance),
            "lora": self.model.lora,
            "batch": self.batch,
            "precision": self.precision,
            "optim": self.optim,
            "comm": self.comm,
            "train": (train.steps, train.seed, train.compile, train.trace_step),
            "data": config.data.cross_document,
            "eval": config.eval,
            "checkpoint": config.checkpoint,
        }
        return {"layout": self.layout.words, **{name: repr(part) for name, part in parts.items()}}

    @property
    def digest(self) -> str:
        """Return the BLAKE2b digest (32 hexadecimal digits) of `identity`."""
        return hashlib.blake2b(json.dumps(self.identity).encode(), digest_size=16).hexdigest()


def resolve(
    config: RunConfig, snapshots: Mapping[str, hub.Snapshot] | None = None, begun: Begun | None = None
) -> ResolvedRun:
    """Return what `config` will run. `snapshots`: the hub's copies of what it names; `begun`: what its run folder says.

    Neither the hub nor the run folder is looked at here (see open_run). Raise ConfigError, ModelError, LayoutError or
    FitError, each with its reason.
    """
    config, snapshots = in_force(config, begun), snapshots or {}
    source = model_source(config.model.source, snapshots)
    hf_config = read_hf_config(config.model, source)
    if config.train.trace_step > config.train.steps:
        raise ConfigError(
            f"train.trace_step={config.train.trace_step} comes after the last of train.steps={config.train.steps}; "
            f"use 1 to {config.train.steps}, or 0 to record none"
        )
    asked = plan_input(config, hf_config)
    choose_balance(asked.job.model, config.model)
    decision = decide(asked, None if begun is None else begun.plan)
    written = pinned_to(spelled_out(config, asked.job), decision.estimate.layout)
    run = ResolvedRun(
        written, hf_config, source, asked.job, decision.estimate, snapshots, decision.pinned, decision.change, begun
    )
    wrong = list(refusals(run.comm, run.layout, run.batch.microbatches(run.layout), run.cluster))
    if run.model.lora is not None and config.comm.async_tp:
        wrong.append("comm.async_tp=true with [lora]: regions with adapters gather before they multiply; set it false")
    if wrong:
        raise LayoutError("; ".join(wrong))
    return run


def open_run(config: RunConfig) -> ResolvedRun:
    """Return what `config` will run, with what the hub has of its sources and its run folder says."""
    return resolve(config, fetch_snapshots(config), read_begun(config))


def with_numerics_key(run: ResolvedRun, numerics: str) -> ResolvedRun:
    """Return `run` resolved anew with this precision.numerics: precision and layout may be others then."""
    precision = run.config.precision.model_copy(update={"numerics": numerics})
    config = run.config.model_copy(update={"precision": precision, "layout": _pinned_section(run)})
    return resolve(config, run.snapshots, run.begun)


def with_plan(run: ResolvedRun, plan: RunPlan) -> ResolvedRun:
    """Return `run` resolved anew as if its folder had this `plan`."""
    begun = Begun(None if run.begun is None else run.begun.config, plan)
    return resolve(run.config.model_copy(update={"layout": _pinned_section(run)}), run.snapshots, begun)


def _pinned_section(run: ResolvedRun) -> LayoutSection:
    """Return the [layout] section of the run file of `run`."""
    return LayoutSection.model_validate(dict(run.pinned))
