"""What Megatron-Core cannot do, and does otherwise than planned: what Megatron-LM and Megatron-Bridge share.

Read in megatron-core 0.16.1 and 0.19.2: model_parallel_config.py, transformer/transformer_config.py, distributed/,
pipeline_parallel/schedules.py; megatron/training/arguments.py of 0.19.2; the Megatron-FSDP guide.
"""

from __future__ import annotations

from collections.abc import Iterator

import kumi.megatron.model_fields as megatron_model
from kumi.export.common import offload, only, optimizer, precision
from kumi.megatron.layout_fields import OPTIMIZERS, has_experts
from kumi.spec.job import Job
from kumi.spec.layout import Layout

NAME = "Megatron"


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Every reason why Megatron-Core cannot train `job` with `layout`."""
    return [
        *megatron_model.problems(job.model),
        *_schedule(job, layout),
        *_states(job, layout),
        *_recompute(layout),
        *_offload(job, layout),
        *_degrees(job, layout),
        *_experts(job, layout),
        *optimizer(job, OPTIMIZERS, NAME),
        *precision(job, NAME, ("bfloat16", "float16", "float32")),
    ]


def _schedule(job: Job, layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    why = "runs 1F1B, plain or interleaved"
    yield from only("schedule", layout.schedule, ("1f1b", "interleaved"), NAME, why)
    if layout.schedule == "1f1b" and layout.stages > 1:
        yield f"stages={layout.stages}: {NAME} runs several stages a rank interleaved; set schedule = 'interleaved'"
    if layout.schedule == "interleaved" and layout.stages > 1 and job.batch.microbatches(layout) % layout.pp:
        yield (
            f"{job.batch.microbatches(layout)} microbatches: {NAME} interleaves them in groups of pp={layout.pp}; "
            f"use a multiple of {layout.pp}"
        )


def _states(job: Job, layout: Layout) -> Iterator[str]:
    if layout.zero > 1 and layout.pp > 1:
        yield (
            f"zero={layout.zero} with pp={layout.pp}: Megatron-FSDP goes with tp, cp and ep, not with pp; "
            f"set zero = 1 or pp = 1"
        )
    if layout.zero > 1 and job.optim.kind == "muon":
        yield f"zero={layout.zero} with muon: Megatron-FSDP has adam and sgd; set zero = 1"


def _recompute(layout: Layout) -> Iterator[str]:
    if layout.recompute_layers is None:
        return
    if layout.recompute == "selective":
        yield f"recompute_layers={layout.recompute_layers}: {NAME} recomputes selectively in all layers or in none"
    elif layout.recompute == "full" and layout.recompute_layers % layout.stages:
        yield (
            f"recompute_layers={layout.recompute_layers}: {NAME} counts them for each of a rank's "
            f"{layout.stages} stages; use a multiple of {layout.stages}"
        )


def _offload(job: Job, layout: Layout) -> Iterator[str]:
    yield from offload(layout, NAME, ("optimizer", "activations"))
    if layout.offload == "optimizer" and layout.zero != 1:
        yield f"offload=optimizer with zero={layout.zero}: {NAME} moves distributed optimizer states; set zero = 1"
    if layout.offload == "optimizer" and job.optim.kind != "adamw":
        yield f"offload=optimizer with {job.optim.kind}: {NAME} does it for adamw"
    if layout.offload == "activations" and (layout.pp > 1 or layout.recompute != "none"):
        yield (
            f"offload=activations: {NAME} combines it neither with pp nor with recomputation; "
            f"set pp = 1 and recompute = 'none'"
        )


def _degrees(job: Job, layout: Layout) -> Iterator[str]:
    if layout.cp > 1 and job.batch.seq_len % (2 * layout.cp):
        yield f"seq_len={job.batch.seq_len}: {NAME} cuts it into 2 x cp={2 * layout.cp} pieces; use a multiple of them"
    if layout.ep > 1 and layout.dp_shard * layout.cp * layout.tp % (layout.ep * layout.expert_tp):
        yield (
            f"ep={layout.ep} x expert_tp={layout.expert_tp} does not divide dp_shard x cp x tp = "
            f"{layout.dp_shard * layout.cp * layout.tp}; {NAME} takes experts' ranks from these"
        )


def _experts(job: Job, layout: Layout) -> Iterator[str]:
    if not has_experts(job.model):
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        yield f"tp={layout.tp} without sequence_parallel: {NAME}'s experts want it; set sequence_parallel = true"


def notes(job: Job, layout: Layout) -> list[str]:
    """What Megatron-Core does differently from the plan, though it carries it out."""
    if layout.recompute != "selective" or job.engine.selective == "attention":
        return []
    return [
        "Recomputation: Megatron makes norms (and the experts' gated products) again; gated products of dense "
        "layers and rotations, which the plan makes again too, are kept, which takes more memory."
    ]
