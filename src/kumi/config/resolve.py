"""Resolve a run file to the run of the trainer: specs, with the layout decided and every default filled in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.balance_section import Balance, choose_balance
from kumi.config.decide_layout import decide_layout
from kumi.config.document_lengths import data_folder, document_span
from kumi.config.generating_run import check_generating_run
from kumi.config.job_sections import LayoutSection
from kumi.config.jobs import comm_spec, plan_input
from kumi.config.model_head import with_objective_head
from kumi.config.model_source import fetch_snapshots, local_folder, read_hf_config, source_folder
from kumi.config.numerics import compiles_layers, pays, pin_numerics, with_numerics_pinned
from kumi.config.pinned_run import pin_layout
from kumi.config.reward_section import model_rewards
from kumi.config.run_length import run_steps, steps_of_epochs, unknown_steps
from kumi.config.run_plan import RunPlan, estimate_figures, made_for
from kumi.config.schema import RunConfig
from kumi.config.stored_config import StoredRun, read_stored_run, with_stored_values
from kumi.config.task_file import with_tasks_of_files
from kumi.errors import ConfigError, LayoutError
from kumi.plan.estimates import Estimate, MemoryEstimate
from kumi.plan.search.candidates import Pins
from kumi.remote.cache_folder import local_run_folder
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.comm import Comm, illegal_comm
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import Numerics
from kumi.spec.optim import Optim
from kumi.spec.precision import Precision
from kumi.spec.saved_tensors import model_digest


@dataclass(frozen=True)
class ResolvedRun:
    """The complete input of the trainer.

    `config`: the run file with every choice pinned, as stored in the run folder.
    `hf_config`: the model's config.json, unchanged unless the model gets a score head.
    `source`: the folder of the model, None for an inline config. It may be a hub snapshot without weights.
    `job`: model, cluster, batch, precision and optimizer.
    `estimate`: the layout with its estimate.
    `snapshots`: snapshots of hub repositories, by the run-file key that names them.
    `pinned`: the layout fields that the run file pins.
    `planned_steps`: the number of steps; None while they follow from data that is not prepared.
    `change`: how and why the layout differs from the stored one, or "".
    `stored`: the content of the run folder; None for a new run.
    """

    config: RunConfig
    hf_config: dict[str, Any]
    source: Path | None
    job: Job
    estimate: Estimate
    snapshots: Mapping[str, hub.Snapshot] = field(default_factory=dict)
    pinned: Pins = field(default_factory=dict)
    planned_steps: int | None = None
    change: str = ""
    stored: StoredRun | None = None

    @property
    def steps(self) -> int:
        """The number of optimizer steps. Raise ConfigError while they follow from data that is not prepared."""
        steps = self.config.train.steps if self.planned_steps is None else self.planned_steps
        if steps is None:
            raise unknown_steps()
        return steps

    @property
    def model(self) -> ModelSpec:
        return self.job.model

    @property
    def base(self) -> ModelSpec:
        """The model without adapters, as weight files contain it."""
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
        """The numerics of the devices; None if they are still to be measured."""
        return self.job.numerics

    @property
    def layout(self) -> Layout:
        return self.estimate.layout

    @property
    def balance(self) -> Balance:
        """The load balancing of routed experts."""
        return choose_balance(self.model, self.config.model)

    @property
    def comm(self) -> Comm:
        """How gradients, parameters and tokens are communicated."""
        comm = comm_spec(self.config)
        return comm if pays("async_tp", self.numerics) else replace(comm, async_tp=False)

    @property
    def compiles(self) -> bool:
        """True if layers are compiled: if the run file asks for it, and it pays on this GPU."""
        return compiles_layers(self.config, self.numerics)

    @property
    def memory(self) -> MemoryEstimate:
        """The memory of the fullest rank."""
        return max(self.estimate.memory, key=lambda stage: stage.total)

    @property
    def step_seconds(self) -> float | None:
        """Estimated seconds of a step; None if the device's speed is unknown."""
        peak = self.cluster.device.peak_flops(self.precision.matmul_dtype)
        return self.estimate.step_seconds if peak else None

    @property
    def out(self) -> Path:
        return local_run_folder(self.config.train.out)

    @property
    def reference_folder(self) -> Path | None:
        """The folder of the model that reference.model names; None if the policy before its first step is the
        reference."""
        return self._folder_of("reference.model", self.config.reference.model)

    @property
    def critic_folder(self) -> Path | None:
        """The folder of the model that critic.model names; None if a critic begins from the policy before its first
        step."""
        return self._folder_of("critic.model", self.config.critic.model)

    def _folder_of(self, key: str, named: str | None) -> Path | None:
        """Return the local folder of the model that `key` names."""
        if key in self.snapshots:
            return self.snapshots[key].folder
        return None if named is None else local_folder(named)

    @property
    def reward_folders(self) -> dict[str, Path]:
        """The folder of each reward model, by the name of its reward."""
        return {
            reward.name: self.snapshots[key].folder if key in self.snapshots else local_folder(reward.source)
            for key, reward in model_rewards(self.config.rewards).items()
        }

    @property
    def critic_optim(self) -> Optim:
        """The optimizer of a critic: that of the policy, with its own learning rate and clip."""
        section, clip = self.config.critic, self.config.critic.grad_clip
        rate = section.rate(self.optim.lr)
        return replace(self.optim, lr=rate, grad_clip=self.optim.grad_clip if clip is None else clip)

    @property
    def plan(self) -> RunPlan:
        """The content of plan.json."""
        figures = estimate_figures(self.estimate, speed_known=self.step_seconds is not None)
        return RunPlan(self.layout, self.pinned, made_for(self.job), figures)

    @property
    def identity(self) -> dict[str, str]:
        """The values that must be the same on all ranks, by section of the run file; paths may differ."""
        config, train = self.config, self.config.train
        parts: dict[str, Any] = {
            "model": (model_digest(self.model), config.model.init, self.balance),
            "lora": self.model.lora,
            "batch": (self.batch.seq_len, self.batch.tokens_per_step),
            "precision": self.precision,
            "optim": self.optim,
            "comm": self.comm,
            "train": (self.planned_steps, train.seed, train.compile, train.trace_step, train.neftune_alpha),
            "data": config.data.cross_document,
            "objective": (config.objective, config.reference.kind),
            "rollout": config.rollout,
            "critic": config.critic,
            "eval": config.eval.model_copy(update={"tasks": [(task.name, task.kind) for task in config.eval.tasks]}),
            "checkpoint": config.checkpoint,
        }
        return {"layout": self.layout.words, **{name: repr(part) for name, part in parts.items()}}

    @property
    def digest(self) -> str:
        """The BLAKE2b digest (32 hexadecimal digits) of `identity`."""
        return hashlib.blake2b(json.dumps(self.identity).encode(), digest_size=16).hexdigest()


def resolve(
    config: RunConfig, snapshots: Mapping[str, hub.Snapshot] | None = None, stored: StoredRun | None = None
) -> ResolvedRun:
    """Resolve `config`, without access to the hub and the run folder (see `open_run`).

    `snapshots`: snapshots of the hub sources of `config`, by key. `stored`: the content of the run folder. Raise
    ConfigError, ModelError, LayoutError or FitError, each with its reason.
    """
    config, snapshots = with_stored_values(config, stored), snapshots or {}
    config = config.model_copy(update={"eval": with_tasks_of_files(config.eval)})
    source = source_folder(config.model.source, snapshots)
    hf_config = read_hf_config(config.model, source)
    steps = run_steps(config)
    if steps is not None and config.train.trace_step > steps:
        last = f"train.steps={steps}" if config.train.epochs is None else f"which is {steps}"
        raise ConfigError(
            f"train.trace_step={config.train.trace_step} is after the last step, {last}; use 1 to {steps}, or 0 to "
            f"record no step"
        )
    planned = plan_input(config, hf_config)
    choose_balance(planned.job.model, config.model)  # raises ConfigError if the model does not support it
    decision = decide_layout(planned, None if stored is None else stored.plan)
    written = pin_layout(pin_numerics(config, planned.job), decision.estimate.layout)
    run = ResolvedRun(
        written,
        with_objective_head(config, hf_config),
        source,
        planned.job,
        decision.estimate,
        snapshots,
        decision.pinned,
        steps,
        decision.change,
        stored,
    )
    problems = list(illegal_comm(run.comm, run.layout, run.batch.microbatches(run.layout), run.cluster))
    if run.model.lora is not None and config.comm.async_tp:
        problems.append(
            "comm.async_tp=true with [lora]: blocks with adapters gather their input before they multiply; set "
            "comm.async_tp = false"
        )
    if problems:
        raise LayoutError("; ".join(problems))
    check_generating_run(run.config, run.job, run.layout)
    return run


def open_run(config: RunConfig) -> ResolvedRun:
    """Resolve `config`, with snapshots of its hub sources and the content of its run folder."""
    return resolve(config, fetch_snapshots(config), read_stored_run(config))


def with_numerics_key(run: ResolvedRun, numerics: Numerics) -> ResolvedRun:
    """Return `run` resolved again with `numerics` pinned, which may change precision and layout."""
    config = with_numerics_pinned(run.config, numerics, run.cluster.device.kind)
    config = config.model_copy(update={"layout": _pinned_section(run)})
    return resolve(config, run.snapshots, run.stored)


def with_plan(run: ResolvedRun, plan: RunPlan) -> ResolvedRun:
    """Return `run` resolved again as if its folder contained `plan`."""
    stored = StoredRun(None if run.stored is None else run.stored.config, plan)
    return resolve(run.config.model_copy(update={"layout": _pinned_section(run)}), run.snapshots, stored)


def with_prepared_data(run: ResolvedRun) -> ResolvedRun:
    """Return `run` with the steps and the estimate that follow from its data, which has been prepared.

    Raise ConfigError if the steps follow from the data, and the data has too few rows.
    """
    steps = run_steps(run.config)
    if steps is None:
        # The data cannot be read, or has too few rows: `steps_of_epochs` is called for its error, which says which.
        from kumi.data import TOKENS, open_store

        folder = data_folder(run.config)
        assert folder is not None, "a run has data"
        steps = steps_of_epochs(run.config, open_store(folder / TOKENS))
    if run.batch.document_span == document_span(run.config) and run.planned_steps == steps:
        return run
    return with_plan(run, run.plan)


def _pinned_section(run: ResolvedRun) -> LayoutSection:
    """Return the section [layout] with the fields that the run file of `run` pins."""
    return LayoutSection.model_validate(dict(run.pinned))
