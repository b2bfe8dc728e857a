"""The job that a run file describes, and the layout fields that it pins (gives in [layout])."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from kumi.config.cluster_source import cluster_spec, cluster_with_nodes
from kumi.config.document_lengths import document_span
from kumi.config.generating_run import generating_keys
from kumi.config.job_sections import LoraSection
from kumi.config.model_head import read_critic, read_model
from kumi.config.model_source import model_name, read_hf_config
from kumi.config.numerics import choose_numerics, compiles_layers, pays
from kumi.config.optim_section import choose_optim
from kumi.config.planned_rollouts import rollout_spec
from kumi.config.run_length import run_steps
from kumi.config.schema import PlanConfig
from kumi.objectives import OBJECTIVES, LinearObjective
from kumi.plan.search.candidates import Pins
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import Device
from kumi.spec.comm import Comm, engine_for, reduce_precision
from kumi.spec.generation_layout import GENERATION_PINS, check_generation_layout
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.lora import Lora
from kumi.spec.loss_passes import LossPasses
from kumi.spec.numerics import Numerics
from kumi.spec.peft import with_adapters
from kumi.spec.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class PlanInput:
    """The input of the planner: a job, and the `pinned` fields of its layout."""

    job: Job
    pinned: Pins


def plan_input(config: PlanConfig, hf_config: dict[str, Any] | None = None) -> PlanInput:
    """Return the planner's input for `config`; arguments and errors as in `job`.

    Raise LayoutError if the run file pins a layout on which the rollouts of `config` cannot be generated.
    """
    # A run that generates texts gets a layout that can, unless the run file pins another, which is then refused.
    pinned = GENERATION_PINS if generating_keys(config) else {}
    pinned = {**pinned, **config.layout.model_dump(exclude_none=True)}
    if config.rollout is not None:
        check_generation_layout(Layout(pp=pinned["pp"], cp=pinned["cp"]), "[rollout]")
    return PlanInput(job(config, hf_config), pinned)


def job(config: PlanConfig, hf_config: dict[str, Any] | None = None) -> Job:
    """Return the job that `config` describes: model, cluster, batch, precision and optimizer.

    `hf_config`: the model's config.json, if it has already been read. Raise ConfigError or ModelError if the run file
    or the model is not valid.
    """
    cluster = cluster_spec(config.cluster)
    numerics, kind = choose_numerics(config, cluster), config.precision.kind
    if kind == "fp8" and not pays("float8", numerics):
        kind = "bf16"
    hf_config = read_hf_config(config.model) if hf_config is None else hf_config
    model, lora = read_model(config, hf_config), None if config.lora is None else lora_spec(config.lora)
    return Job(
        model=model if lora is None else with_adapters(model, lora),
        cluster=cluster,
        batch=BatchSpec(config.batch.seq_len, config.batch.tokens_per_step, document_span(config)),
        precision=reduce_precision(choose_precision(kind, cluster.device, numerics), comm_spec(config)),
        optim=choose_optim(config.optim, run_steps(config)),
        engine=engine_for(comm_spec(config), cluster.device, numerics, compiled=compiles_layers(config, numerics)),
        passes=loss_passes(config),
        rollout=rollout_spec(config),
        critic=read_critic(hf_config, lora) if config.objective.trains_critic else None,
        numerics=numerics,
        margin=None if config.plan.margin == "auto" else float(config.plan.margin),
        model_name=model_name(config.model),
        cluster_of_nodes=partial(cluster_with_nodes, config.cluster),
    )


def loss_passes(config: PlanConfig) -> LossPasses:
    """Return which passes of the model and of its head the loss of `config` adds to a step."""
    objective = OBJECTIVES[config.objective.kind]
    rows = 2 if objective.rows.mismatched else 1
    # Mismatched rows, in which prompts have replies to other prompts, take a forward pass of their own. The reference
    # takes one for each kind of row, unless its log-probs are stored.
    reference = rows if config.reference.kind == "adapters-off" else 0
    forwards, later = rows - 1 + reference, 0
    if config.rollout is not None:
        # Before the updates with a batch: the reference's pass, and the pass for old log-probs. Without the latter, the
        # first update has the old log-probs itself, and each later update takes a pass for its part of the batch.
        needs_old = config.rollout.passes > 1 or config.objective.needs_old_log_probs
        forwards = int(config.objective.reads_reference) + int(needs_old)
        later = int(config.rollout.updates > 1 and not needs_old)
    repeats_head = objective.head == "lm" and not issubclass(objective, LinearObjective)
    return LossPasses(repeats_head, forwards, later)


def lora_spec(section: LoraSection) -> Lora:
    """Return the adapters that `section` describes."""
    targets = section.target_modules
    return Lora(
        section.r,
        section.alpha,
        (targets,) if isinstance(targets, str) else targets,
        section.dropout,
        section.use_rslora,
        section.use_dora,
        section.init,
        section.quantize.removeprefix("none"),
        section.modules_to_save,
    )


def comm_spec(config: PlanConfig) -> Comm:
    """Return how gradients, parameters and tokens are communicated."""
    return Comm(**config.comm.model_dump())


def choose_precision(kind: str, device: Device, numerics: Numerics | None = None) -> Precision:
    """Return the precision named `kind`.

    "auto" is the precision of `numerics`, if it names one. Otherwise it is bf16 if `device` computes bfloat16 fast,
    fp16 if it computes only float16 fast, as GPUs before Ampere do, and fp32 on other devices.
    """
    if kind == "auto" and numerics is not None and numerics.kind:
        kind = numerics.kind
    elif kind == "auto":
        kind = "bf16" if "bfloat16" in device.dtypes else "fp16" if "float16" in device.dtypes else "fp32"
    return PRECISIONS[kind]
