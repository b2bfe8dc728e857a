"""A layout in the words of Megatron-Core: fields of its TransformerConfig, and names of optimizers and schedules.

Read in megatron-core 0.16.1 and 0.19.2: model_parallel_config.py, transformer/transformer_config.py, distributed/;
megatron/training/arguments.py of 0.19.2; the Megatron-FSDP guide.
"""

from __future__ import annotations

from typing import Any

from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.sharding import stage_bounds

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
LR_STYLES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "WSD"}
# What Megatron-FSDP divides at each ZeRO stage; ZeRO-1 is the distributed optimizer's, without FSDP.
FSDP = {2: "optim_grads", 3: "optim_grads_params"}
VOCAB_MULTIPLE = 128


def has_experts(model: ModelSpec) -> bool:
    """Whether any layer is a mixture of experts."""
    return any(isinstance(layer.mlp, MoE) for layer in model.layer_kinds()[0])


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
    return {"pipeline_model_parallel_layout": stage_text(stage_bounds(layout, model.num_hidden_layers))}


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
