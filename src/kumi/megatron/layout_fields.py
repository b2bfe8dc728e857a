"""A layout as fields of Megatron-Core's TransformerConfig, and the names of optimizers and schedules.

Sources: megatron-core 0.16.1 and 0.19.2: model_parallel_config.py, transformer/transformer_config.py, distributed/;
megatron/training/arguments.py of 0.19.2; the Megatron-FSDP guide.
"""

from __future__ import annotations

from typing import Any

from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec, MoE
from kumi.spec.sharding import stage_bounds

# kumi's names of optimizers and of learning-rate schedules -> Megatron's.
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}
LR_STYLES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "WSD"}
# ZeRO stage -> the sharding strategy of Megatron-FSDP. ZeRO-1 is the distributed optimizer, without FSDP.
FSDP_SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
# Exports let Megatron pad the vocabulary to a multiple of this many rows.
VOCAB_MULTIPLE = 128


def has_experts(model: ModelSpec) -> bool:
    """True if any layer is a mixture of experts."""
    return any(isinstance(layer.mlp, MoE) for layer in model.unique_layers()[0])


def layout_config_fields(job: Job, layout: Layout) -> dict[str, Any]:
    """Return `layout` as fields of TransformerConfig."""
    moe, sequence_parallel = has_experts(job.model), layout.tp > 1 and layout.sequence_parallel
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": sequence_parallel,
        **({"tp_comm_overlap": True} if sequence_parallel and job.engine.overlap_tp else {}),
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
    """Return the field with the number of virtual stages, or, for an uneven division, with the layers of each stage."""
    if layout.pp == 1:
        return {}
    count = layout.pp * layout.stages
    even = not layout.stage_layers and model.num_hidden_layers % count == 0
    if even:
        return {"virtual_pipeline_model_parallel_size": layout.stages} if layout.stages > 1 else {}
    return {"pipeline_model_parallel_layout": _stage_text(stage_bounds(layout, model.num_hidden_layers))}


def _stage_text(stages: tuple[tuple[int, int], ...]) -> str:
    """Return the layers [first, last) of each stage as Et*3|t*4|t*3L: embedding, transformer layers, loss."""
    parts = [f"t*{last - first}" if last > first else "" for first, last in stages]
    return "|".join(["E" + parts[0], *parts[1:]]) + "L"


def _recompute_fields(job: Job, layout: Layout, *, moe: bool) -> dict[str, Any]:
    """Return the fields for recomputation; `moe`: the model has experts, and Megatron recomputes a part of them."""
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
