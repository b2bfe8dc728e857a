"""A layout in the words of Megatron-Core, and what it cannot do: what Megatron-LM and Megatron-Bridge share.

Read in megatron-core 0.16.1 and 0.19.2: model_parallel_config.py, transformer/transformer_config.py, distributed/,
pipeline_parallel/schedules.py; megatron/training/arguments.py of 0.19.2; the Megatron-FSDP guide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kumi.plan.export.megatron_model as megatron_model
from kumi.plan.export.common import offload, only, optimizer, precision
from kumi.plan.stages import bounds
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec, MoE

NAME = "Megatron"
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
LR_STYLES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "WSD"}
# What Megatron-FSDP divides at each ZeRO stage; ZeRO-1 is the distributed optimizer's, without FSDP.
FSDP = {2: "optim_grads", 3: "optim_grads_params"}
VOCAB_MULTIPLE = 128


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


def has_experts(model: ModelSpec) -> bool:
    """Whether any layer is a mixture of experts."""
    return any(isinstance(layer.mlp, MoE) for layer in model.layer_kinds()[0])


def notes(job: Job, layout: Layout) -> list[str]:
    """What Megatron-Core does differently from the plan, though it carries it out."""
    if layout.recompute != "selective" or job.engine.selective == "attention":
        return []
    return [
        "Recomputation: Megatron makes norms (and the experts' gated products) again; gated products of dense "
        "layers and rotations, which the plan makes again too, are kept, which takes more memory."
    ]


def fields(job: Job, layout: Layout) -> dict[str, Any]:
    """`layout` as fields of TransformerConfig; virtual stages as Megatron-Core counts them."""
    moe, cut = has_experts(job.model), layout.tp > 1 and layout.sequence_parallel
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": cut,
        **({"tp_comm_overlap": True} if cut and job.engine.overlap_tp else {}),
        "pipeline_model_parallel_size": layout.pp,
        **_stages(job.model, layout),
        "context_parallel_size": layout.cp,
        **({"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.expert_tp} if moe else {}),
        **_recompute_fields(job, layout, moe=moe),
        **({"cpu_offloading_num_layers": job.model.num_hidden_layers - 1} if layout.offload == "activations" else {}),
        "bf16": job.precision.compute == "bfloat16",
        "fp16": job.precision.compute == "float16",
    }


def _stages(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Virtual stages, and the layers of every stage where they differ from an even division."""
    if layout.pp == 1:
        return {}
    count = layout.pp * layout.stages
    even = not layout.stage_layers and model.num_hidden_layers % count == 0
    if even:
        return {"virtual_pipeline_model_parallel_size": layout.stages} if layout.stages > 1 else {}
    return {"pipeline_model_parallel_layout": stage_text(bounds(layout, model))}


def stage_text(stages: tuple[tuple[int, int], ...]) -> str:
    """Layers [first, last) of every stage as Et*3|t*4|t*3L: embedding, transformer layers, loss."""
    parts = [f"t*{last - first}" if last > first else "" for first, last in stages]
    return "|".join(["E" + parts[0], *parts[1:]]) + "L"


def _recompute_fields(job: Job, layout: Layout, *, moe: bool) -> dict[str, Any]:
    if layout.recompute == "none" or layout.recompute_layers == 0:
        return {}
    if layout.recompute == "selective":
        modules = ["core_attn"]
        if job.engine.selective != "attention":
            modules = ["layernorm", *(["moe_act"] if moe else [])]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    layers = layout.recompute_layers
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform" if layers is None else "block",
        "recompute_num_layers": 1 if layers is None else layers // layout.stages,
    }
