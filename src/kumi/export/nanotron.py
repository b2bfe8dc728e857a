"""Export to nanotron: YAML for its current repository (v0.5), and for release 0.4 if that supports the plan.

Checked against nanotron 0.4 and huggingface/nanotron: config/{config,parallelism_config,models_config}.py,
models/llama.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.export.common import (
    SYNTHETIC_DATA,
    min_learning_rate,
    plan_title,
    torchrun_command,
    unsupported_offload,
    unsupported_optimizer,
    unsupported_precision,
    unsupported_value,
)
from kumi.export.text import to_yaml
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import Attention, ModelSpec
from kumi.spec.uniform_layers import UniformLayers, traits_beyond_llama, uniform_layers

_NAME = "nanotron"
_FILE, _FILE_04 = "nanotron.yaml", "nanotron-0.4.yaml"
# kumi's pipeline schedules -> nanotron's pipeline engines.
_ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
# The only RoPE base of release 0.4.
_ROPE_THETA_04 = 10_000.0


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Return all reasons why nanotron does not support `layout` for `job`."""
    return [
        *_unsupported_model(job.model),
        *unsupported_value("zero", layout.zero, (0, 1), _NAME, "shards optimizer states at most"),
        *_unsupported_degrees(layout),
        *_unsupported_pipeline(layout),
        *_unsupported_recompute(layout),
        *unsupported_offload(layout, _NAME, ()),
        *unsupported_optimizer(job, ("adamw",), _NAME),
        *unsupported_precision(job, _NAME, ("bfloat16", "float32")),
    ]


def _unsupported_model(model: ModelSpec) -> Iterator[str]:
    """Check that nanotron's Llama can be `model`."""
    layers = uniform_layers(model)
    if layers is None or layers.moe is not None or not isinstance(layers.attention, Attention):
        yield (
            "experts, latent attention, or layers that differ or are not attention with an mlp each: kumi exports to "
            "nanotron's Llama, whose layers are all the same"
        )
        return
    lacking = [
        feature for feature, present in _unsupported_features(model, layers, layers.attention).items() if present
    ]
    if lacking:
        yield f"nanotron's Llama has no {', '.join(lacking)}"
    if layers.attention.rope is not None and layers.attention.rope.scaling is not None:
        yield (
            f"rope_scaling={layers.attention.rope.scaling}: nanotron's Llama has plain RoPE; to train from "
            f"scratch, leave it out of config.json"
        )


def _unsupported_features(model: ModelSpec, layers: UniformLayers, attention: Attention) -> dict[str, bool]:
    """Return features that nanotron's Llama lacks -> whether the model has them."""
    dense, layer = layers.dense, layers.layer
    return {
        "sliding windows": layers.window is not None,
        "biases": attention.qkv_bias or attention.out_bias or (dense is not None and dense.bias),
        "mlp other than SwiGLU": dense is not None and (dense.hidden_act != "silu" or not dense.gated),
        "layer norm": model.norm != "rmsnorm",
        "query norms": attention.qk_norm or attention.qk_norm_whole,
        "attention sinks": attention.sinks,
        "positions other than RoPE": attention.rope is None,
        "partial RoPE": attention.rotary_dim not in (0, attention.head_dim),
        "head_dim other than hidden_size / num_attention_heads": attention.head_dim * attention.num_attention_heads
        != model.hidden_size,
        "other order of norms, attention and mlp": layer.parallel or layer.post_norms or model.embedding_norm,
        **traits_beyond_llama(model, layers),
    }


def _unsupported_degrees(layout: Layout) -> Iterator[str]:
    """Check for cp, ep, and replicas with ZeRO."""
    for axis in ("cp", "ep"):
        if getattr(layout, axis) > 1:
            yield f"{axis}={getattr(layout, axis)}: {_NAME}'s Llama does not support it; set {axis} = 1"
    if layout.zero and layout.dp_replicate > 1:
        yield (
            f"dp_replicate={layout.dp_replicate} with zero=1: {_NAME} shards states over all data ranks; "
            f"set dp_shard = {layout.dp} and dp_replicate = 1"
        )


def _unsupported_pipeline(layout: Layout) -> Iterator[str]:
    """Check the pipeline schedule and its stages."""
    if layout.pp == 1:
        return
    yield from unsupported_value(
        "schedule", layout.schedule, _ENGINES, _NAME, "has one stage per rank, with 1F1B or GPipe"
    )
    if layout.stages > 1:
        yield f"stages={layout.stages}: {_NAME} has one stage per rank; set stages = 1"
    if layout.stage_layers:
        yield f"stage_layers={layout.stage_layers}: {_NAME} splits the layers by its own cost model; leave it empty"


def _unsupported_recompute(layout: Layout) -> Iterator[str]:
    yield from unsupported_value("recompute", layout.recompute, ("none", "full"), _NAME, "recomputes whole layers")
    if layout.recompute == "full" and layout.recompute_layers is not None:
        yield f"recompute_layers={layout.recompute_layers}: {_NAME} recomputes all layers or none; leave it out"


def _unsupported_by_04(job: Job, layout: Layout) -> list[str]:
    """Return why release 0.4 does not support the plan; `unsupported` is about the current repository."""
    rope = job.model.first_attention.rope
    missing = []
    if rope is None or rope.rope_theta != _ROPE_THETA_04:
        missing.append(f"rope_theta={None if rope is None else rope.rope_theta} (it always uses {_ROPE_THETA_04:g})")
    if layout.recompute != "none":
        missing.append(f"recompute={layout.recompute} (it recomputes nothing)")
    return missing


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """Return the configuration for the repository and, if it supports the plan, for release 0.4."""
    missing = _unsupported_by_04(job, layout)
    head = [
        plan_title(job, layout, _NAME),
        SYNTHETIC_DATA,
        *(
            ["Stages: nanotron splits the layers by its own cost model, perhaps not as the plan does."]
            if layout.pp > 1
            else []
        ),
    ]
    line = f"$ CUDA_DEVICE_MAX_CONNECTIONS=1 {torchrun_command(job, layout)} run_train.py --config-file"
    repository = [
        "For nanotron's repository (v0.5)." + (f" Release 0.4 lacks {' and '.join(missing)}." if missing else "")
    ]
    result = {_FILE: to_yaml(_configuration(job, layout, steps), [*head, *repository, f"{line} {_FILE}"])}
    if not missing:
        old = [*head, "For the release nanotron 0.4.", f"{line} {_FILE_04}"]
        result[_FILE_04] = to_yaml(_configuration_04(job, layout, steps), old)
    return result


def _configuration(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """Return the configuration file for the repository, as data."""
    rope = job.model.first_attention.rope
    adam = {"name": "adamW", **_adam(job)}
    model = {**_llama(job.model), "rope_theta": None if rope is None else rope.rope_theta, "rope_interleaved": False}
    return {
        **_common_sections(job, layout, steps, model),
        "parallelism": {**_parallelism(job, layout), "recompute_layer": layout.recompute == "full"},
        "optimizer": {
            **_optimizer(job, layout, steps),
            "optimizer_factory": adam,
            "weight_decay_exclude_named_params": [".*norm.*", ".*bias"],
        },
        "data_stages": [{"name": "planned", "start_training_step": 1, "data": _data()}],
    }


def _configuration_04(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """Return the configuration file for release 0.4, as data."""
    return {
        **_common_sections(job, layout, steps, _llama(job.model)),
        "parallelism": _parallelism(job, layout),
        "optimizer": {**_optimizer(job, layout, steps), **_adam(job)},
        "data": _data(),
    }


def _common_sections(job: Job, layout: Layout, steps: int, model: dict[str, Any]) -> dict[str, Any]:
    """Return the sections that both files have alike, but for `model`, the part with the model's sizes."""
    return {
        "general": {"project": "kumi", "run": "planned", "seed": 42, "ignore_sanity_checks": True},
        "model": {
            "model_config": model,
            "init_method": {"std": job.model.initializer_range},
            "dtype": job.precision.compute,
            "make_vocab_size_divisible_by": 1,
        },
        "tokens": {
            "sequence_length": job.batch.seq_len,
            "train_steps": steps,
            "micro_batch_size": layout.microbatch,
            "batch_accumulation_per_replica": job.batch.microbatches(layout),
        },
        "tokenizer": {"tokenizer_name_or_path": None},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": steps},
        "logging": {"iteration_step_info_interval": 1},
    }


def _parallelism(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the section on parallelism."""
    return {
        "dp": layout.dp,
        "pp": layout.pp,
        "tp": layout.tp,
        "expert_parallel_size": 1,
        "pp_engine": _ENGINES.get(layout.schedule, "1f1b"),
        "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        "tp_linear_async_communication": job.engine.overlap_tp and layout.sequence_parallel,
    }


def _llama(model: ModelSpec) -> dict[str, Any]:
    """Return `model` as nanotron's LlamaConfig."""
    layers = uniform_layers(model)
    assert layers is not None, "unsupported() refuses other models"
    assert layers.dense is not None, "unsupported() refuses other models"
    eos = model.eos_token_id
    return {
        "is_llama_config": True,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": layers.dense.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": layers.attention.num_attention_heads,
        "num_key_value_heads": layers.attention.num_key_value_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": layers.dense.hidden_act,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": 1 if model.bos_token_id is None else model.bos_token_id,
        "eos_token_id": 2 if eos is None else eos[0] if isinstance(eos, tuple) else eos,
        "pad_token_id": model.pad_token_id,
    }


def _optimizer(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """Return the keys of the optimizer's section that both files have alike."""
    optim = job.optim
    return {
        "zero_stage": layout.zero,
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.grad_clip,
        "accumulate_grad_in_fp32": True,
        "learning_rate_scheduler": _learning_rate(job, steps),
    }


def _adam(job: Job) -> dict[str, Any]:
    """Return the keys of AdamW."""
    optim = job.optim
    return {
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_eps": optim.eps,
        "torch_adam_is_fused": True,
    }


def _learning_rate(job: Job, steps: int) -> dict[str, Any]:
    """Return the keys of the learning-rate schedule; a constant rate is one that decays to itself."""
    optim = job.optim
    warmup = min(optim.warmup_steps, steps - 1)
    decay = min(optim.decay_steps, steps - warmup) if optim.schedule == "wsd" else steps - warmup
    return {
        "learning_rate": optim.lr,
        "lr_warmup_steps": warmup,
        "lr_warmup_style": "linear",
        "lr_decay_style": "cosine" if optim.schedule == "cosine" else "linear",
        "lr_decay_starting_step": steps - decay,
        "lr_decay_steps": decay,
        "min_decay_lr": optim.lr if optim.schedule == "constant" else min_learning_rate(optim),
    }


def _data() -> dict[str, Any]:
    return {"dataset": None, "seed": 42, "num_loading_workers": 1}
