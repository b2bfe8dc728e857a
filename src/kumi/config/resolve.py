"""From what a run file says to what will run: specs, with the layout chosen and everything derived."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.balance import Balance, choose_balance
from kumi.config.cluster import cluster_spec, on_nodes
from kumi.config.model import local_folder, read_hf_config, snapshot
from kumi.config.numerics import chosen, spelled_out
from kumi.config.optim import choose_optim
from kumi.config.schema import LoraSection, PlanConfig, RunConfig
from kumi.config.stored import in_force
from kumi.errors import ConfigError, LayoutError
from kumi.plan.choose import choose_layout
from kumi.plan.types import Estimate, MemoryEstimate
from kumi.spec import families
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.comm import Comm, engine_with, refusals, sent_in
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import Numerics
from kumi.spec.optim import Optim
from kumi.spec.peft import with_adapters
from kumi.spec.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class Run:
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


def resolve(config: RunConfig) -> Run:
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
    wanted = job(config, hf_config)
    choose_balance(wanted.model, config.model)
    estimate = choose_layout(wanted, config.layout.model_dump(exclude_none=True))
    run = Run(spelled_out(config, wanted), hf_config, source, wanted, estimate, snapshots)
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


def job(config: PlanConfig, hf_config: dict[str, Any] | None = None) -> Job:
    """What `config` trains on what, the same for who plans and who trains. `hf_config` is the model's config.json where
    it has been read already. Raises ConfigError or ModelError."""
    cluster = cluster_spec(config.cluster)
    numerics, kind = chosen(config, cluster), config.precision.kind
    model = families.from_hf(read_hf_config(config.model) if hf_config is None else hf_config)
    return Job(
        model=model if config.lora is None else with_adapters(model, adapters(config.lora)),
        cluster=cluster,
        batch=BatchSpec(config.batch.seq_len, config.batch.tokens_per_step),
        precision=sent_in(choose_precision(kind, cluster.device, numerics), comm(config)),
        optim=choose_optim(config.optim, None if config.train is None else config.train.steps),
        engine=engine_with(comm(config)),
        numerics=numerics,
        of_nodes=partial(on_nodes, config.cluster),
    )


def adapters(section: LoraSection) -> Lora:
    """The adapters that `section` describes."""
    wanted = section.target_modules
    return Lora(
        section.r, section.alpha, (wanted,) if isinstance(wanted, str) else wanted, section.dropout,
        section.use_rslora, section.use_dora, section.init, section.quantize.removeprefix("none"),
    )  # fmt: skip


def comm(config: PlanConfig) -> Comm:
    """How gradients and parameters travel."""
    return Comm(**config.comm.model_dump())


def choose_precision(kind: str, device: Device, numerics: Numerics | None = None) -> Precision:
    """The precision named `kind`; "auto" is that of `numerics`, if it has one, else bf16 where `device` computes it
    fast, else fp16 where it does that, as GPUs before Ampere do, else fp32."""
    if kind == "auto" and numerics is not None and numerics.kind:
        kind = numerics.kind
    elif kind == "auto":
        kind = "bf16" if "bfloat16" in device.dtypes else "fp16" if "float16" in device.dtypes else "fp32"
    return PRECISIONS[kind]
