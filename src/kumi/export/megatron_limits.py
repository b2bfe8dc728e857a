"""Limits of Megatron-Core and its differences from a plan, shared by Megatron-LM and Megatron-Bridge.

Checked against megatron-core 0.16.1 and 0.19.2: model_parallel_config.py, transformer/transformer_config.py,
distributed/, pipeline_parallel/schedules.py; megatron/training/arguments.py of 0.19.2; the Megatron-FSDP guide.
"""

from __future__ import annotations

from collections.abc import Iterator

import kumi.megatron.model_fields as megatron_model
from kumi.export.common import unsupported_offload, unsupported_optimizer, unsupported_precision, unsupported_value
from kumi.megatron.layout_fields import OPTIMIZERS, has_experts
from kumi.spec.job import Job
from kumi.spec.layout import Layout

_NAME = "Megatron"


def unsupported_by_megatron(job: Job, layout: Layout) -> list[str]:
    """Return all reasons why Megatron-Core does not support `layout` for `job`."""
    return [
        *megatron_model.unsupported_by_megatron(job.model),
        *_unsupported_schedule(job, layout),
        *_unsupported_states(job, layout),
        *_unsupported_recompute(layout),
        *_unsupported_offload(job, layout),
        *_unsupported_degrees(job, layout),
        *_unsupported_experts(job, layout),
        *unsupported_optimizer(job, OPTIMIZERS, _NAME),
        *unsupported_precision(job, _NAME, ("bfloat16", "float16", "float32")),
    ]


def _unsupported_schedule(job: Job, layout: Layout) -> Iterator[str]:
    """Check the pipeline schedule, its stages and the number of microbatches."""
    if layout.pp == 1:
        return
    why = "has 1F1B, plain or interleaved"
    yield from unsupported_value("schedule", layout.schedule, ("1f1b", "interleaved"), _NAME, why)
    if layout.schedule == "1f1b" and layout.stages > 1:
        yield f"stages={layout.stages}: {_NAME} interleaves several stages per rank; set schedule = 'interleaved'"
    if layout.schedule == "interleaved" and layout.stages > 1 and job.batch.microbatches(layout) % layout.pp:
        yield (
            f"{job.batch.microbatches(layout)} microbatches: {_NAME} interleaves them in groups of pp={layout.pp}; "
            f"use a multiple of {layout.pp}"
        )


def _unsupported_states(job: Job, layout: Layout) -> Iterator[str]:
    """Check ZeRO-2 and 3, which are Megatron-FSDP."""
    if layout.zero > 1 and layout.pp > 1:
        yield (
            f"zero={layout.zero} with pp={layout.pp}: Megatron-FSDP supports tp, cp and ep, not pp; "
            f"set zero = 1 or pp = 1"
        )
    if layout.zero > 1 and job.optim.kind == "muon":
        yield f"zero={layout.zero} with muon: Megatron-FSDP supports adam and sgd; set zero = 1"


def _unsupported_recompute(layout: Layout) -> Iterator[str]:
    """Check the number of layers that are recomputed."""
    if layout.recompute_layers is None:
        return
    if layout.recompute == "selective":
        yield (
            f"recompute_layers={layout.recompute_layers}: {_NAME} recomputes selectively in all layers or none; leave "
            f"it out"
        )
    elif layout.recompute == "full" and layout.recompute_layers % layout.stages:
        yield (
            f"recompute_layers={layout.recompute_layers}: {_NAME} counts them per stage, and a rank has "
            f"{layout.stages} stages; use a multiple of {layout.stages}"
        )


def _unsupported_offload(job: Job, layout: Layout) -> Iterator[str]:
    """Check the offloading, and what it is combined with."""
    yield from unsupported_offload(layout, _NAME, ("optimizer", "activations"))
    if layout.offload == "optimizer" and layout.zero != 1:
        yield f"offload=optimizer with zero={layout.zero}: {_NAME} offloads the distributed optimizer; set zero = 1"
    if layout.offload == "optimizer" and job.optim.kind != "adamw":
        yield f"offload=optimizer with {job.optim.kind}: {_NAME} supports it for adamw only; use adamw"
    if layout.offload == "activations" and (layout.pp > 1 or layout.recompute != "none"):
        yield (
            f"offload=activations: {_NAME} supports it neither with pp nor with recomputation; "
            f"set pp = 1 and recompute = 'none'"
        )


def _unsupported_degrees(job: Job, layout: Layout) -> Iterator[str]:
    """Check that 2 x cp divides the sequence, and that ep x expert_tp divides the ranks that hold experts."""
    if layout.cp > 1 and job.batch.seq_len % (2 * layout.cp):
        yield f"seq_len={job.batch.seq_len}: {_NAME} splits it into 2 x cp parts; use a multiple of {2 * layout.cp}"
    if layout.ep > 1 and layout.dp_shard * layout.cp * layout.tp % (layout.ep * layout.expert_tp):
        yield (
            f"ep={layout.ep} x expert_tp={layout.expert_tp} does not divide dp_shard x cp x tp = "
            f"{layout.dp_shard * layout.cp * layout.tp}, the ranks over which {_NAME} distributes experts; use divisors"
        )


def _unsupported_experts(job: Job, layout: Layout) -> Iterator[str]:
    """Check for experts without sequence parallelism."""
    if not has_experts(job.model):
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        yield f"tp={layout.tp} without sequence_parallel: {_NAME}'s experts need it; set sequence_parallel = true"


def megatron_notes(job: Job, layout: Layout) -> list[str]:
    """Return the differences between the plan and what Megatron-Core does."""
    if layout.recompute != "selective" or job.engine.selective == "attention":
        return []
    return [
        "Recomputation: Megatron recomputes norms (and the experts' gated products). The plan also recomputes the "
        "gated products of dense layers and rotary embeddings, which Megatron keeps in memory."
    ]
