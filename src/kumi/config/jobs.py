"""What a run file asks of the planner: the job, and what it pins of the layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from kumi.config.cluster_source import cluster_spec, on_nodes
from kumi.config.model_source import read_hf_config
from kumi.config.numerics import chosen
from kumi.config.optim_section import choose_optim
from kumi.config.schema import LoraSection, PlanConfig
from kumi.plan.search.candidates import Pins
from kumi.spec import families
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import Device
from kumi.spec.comm import Comm, engine_with, sent_in
from kumi.spec.job import Job
from kumi.spec.lora import Lora
from kumi.spec.numerics import Numerics
from kumi.spec.peft import with_adapters
from kumi.spec.precision import PRECISIONS, Precision


@dataclass(frozen=True)
class PlanInput:
    """What the planner is asked: the layout of `job`, with these fields `pinned`."""

    job: Job
    pinned: Pins


def plan_input(config: PlanConfig, hf_config: dict[str, Any] | None = None) -> PlanInput:
    """Return what `config` asks of the planner. Arguments and errors are those of `job`."""
    return PlanInput(job(config, hf_config), config.layout.model_dump(exclude_none=True))


def job(config: PlanConfig, hf_config: dict[str, Any] | None = None) -> Job:
    """Return what `config` trains on what, the same for planning and training. `hf_config` is the model's config.json
    where it has been read already. Raise ConfigError or ModelError where either is wrong."""
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
        section.r,
        section.alpha,
        (wanted,) if isinstance(wanted, str) else wanted,
        section.dropout,
        section.use_rslora,
        section.use_dora,
        section.init,
        section.quantize.removeprefix("none"),
    )


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
