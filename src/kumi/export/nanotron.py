"""nanotron's YAML, for its repository as it is now (v0.5), and for release 0.4 where that can carry the plan out.

Read in nanotron 0.4 and in huggingface/nanotron: config/{config,parallelism_config,models_config}.py, models/llama.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.export.common import MADE_UP, floor, offload, only, optimizer, precision, title, torchrun
from kumi.export.text import to_yaml
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import Attention, ModelSpec
from kumi.spec.uniform_layers import Alike, alike, uncommon

NAME = "nanotron"
FILE, FILE_04 = "nanotron.yaml", "nanotron-0.4.yaml"
ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
# The only base that release 0.4 turns with.
THETA_04 = 10_000.0


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Every reason why nanotron cannot train `job` with `layout`."""
    return [
        *_model(job.model),
        *only("zero", layout.zero, (0, 1), NAME, "divides optimizer states at most"),
        *_degrees(layout),
        *_pipeline(layout),
        *_recompute(layout),
        *offload(layout, NAME, ()),
        *optimizer(job, ("adamw",), NAME),
        *precision(job, NAME, ("bfloat16", "float32")),
    ]


def _model(model: ModelSpec) -> Iterator[str]:
    found = alike(model)
    if found is None or found.moe is not None or not isinstance(found.attention, Attention):
        yield (
            "experts, latent attention, or layers that differ or are not attention with an mlp each: kumi writes "
            "nanotron's Llama, whose layers are alike"
        )
        return
    wrong = [what for what, there in _foreign(model, found, found.attention).items() if there]
    if wrong:
        yield f"nanotron's Llama has no {', '.join(wrong)}"
    if found.attention.rope is not None and found.attention.rope.scaling is not None:
        yield (
            f"rope_scaling={found.attention.rope.scaling}: nanotron's Llama turns without it; leave it out of "
            f"config.json where the model is trained from the start"
        )


def _foreign(model: ModelSpec, found: Alike, attention: Attention) -> dict[str, bool]:
    """Traits that nanotron's Llama lacks, and whether the model has them."""
    dense, layer = found.dense, found.layer
    return {
        "windows": found.window is not None,
        "biases": attention.qkv_bias or attention.out_bias or (dense is not None and dense.bias),
        "other mlp than SwiGLU": dense is not None and (dense.hidden_act != "silu" or not dense.gated),
        "layer norm": model.norm != "rmsnorm",
        "query norms": attention.qk_norm or attention.qk_norm_whole,
        "attention sinks": attention.sinks,
        "positions but rotary ones": attention.rope is None,
        "partly turned heads": attention.rotary_dim not in (0, attention.head_dim),
        "heads of another size than hidden_size / num_attention_heads": attention.head_dim
        * attention.num_attention_heads
        != model.hidden_size,
        "other order of norms, attention and mlp": layer.parallel or layer.post_norms or model.embedding_norm,
        **uncommon(model, found),
    }


def _degrees(layout: Layout) -> Iterator[str]:
    for axis in ("cp", "ep"):
        if getattr(layout, axis) > 1:
            yield f"{axis}={getattr(layout, axis)}: {NAME}'s Llama has no such axis; set {axis} = 1"
    if layout.zero and layout.dp_replicate > 1:
        yield (
            f"dp_replicate={layout.dp_replicate} with zero=1: {NAME} divides states over all data ranks; "
            f"set dp_shard = {layout.dp} and dp_replicate = 1"
        )


def _pipeline(layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    yield from only("schedule", layout.schedule, ENGINES, NAME, "runs one stage a rank, 1F1B or all forwards first")
    if layout.stages > 1:
        yield f"stages={layout.stages}: {NAME} has one stage a rank; set stages = 1"
    if layout.stage_layers:
        yield f"stage_layers={layout.stage_layers}: {NAME} divides layers by its own count of costs; leave it empty"


def _recompute(layout: Layout) -> Iterator[str]:
    yield from only("recompute", layout.recompute, ("none", "full"), NAME, "recomputes whole layers")
    if layout.recompute == "full" and layout.recompute_layers is not None:
        yield f"recompute_layers={layout.recompute_layers}: {NAME} recomputes all layers or none"


def missing_in_04(job: Job, layout: Layout) -> list[str]:
    """Why release 0.4, older than what `unsupported` speaks of, cannot carry the plan out."""
    rope = job.model.first_attention.rope
    found = []
    if rope is None or rope.rope_theta != THETA_04:
        found.append(f"rope_theta={None if rope is None else rope.rope_theta} (it has {THETA_04:g} built in)")
    if layout.recompute != "none":
        found.append(f"recompute={layout.recompute} (it keeps everything)")
    return found


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """The configuration for the repository and, where it can, for release 0.4."""
    missing = missing_in_04(job, layout)
    head = [
        title(job, layout, NAME),
        MADE_UP,
        *(
            ["Stages: nanotron divides layers by its own count of costs, which may differ from the plan's."]
            if layout.pp > 1
            else []
        ),
    ]
    line = f"$ CUDA_DEVICE_MAX_CONNECTIONS=1 {torchrun(job, layout)} run_train.py --config-file"
    repository = [
        "For nanotron's repository (v0.5)." + (f" Release 0.4 lacks {' and '.join(missing)}." if missing else "")
    ]
    found = {FILE: to_yaml(configuration(job, layout, steps), [*head, *repository, f"{line} {FILE}"])}
    if not missing:
        old = [*head, "For nanotron 0.4, as released.", f"{line} {FILE_04}"]
        found[FILE_04] = to_yaml(configuration_04(job, layout, steps), old)
    return found


def configuration(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """The configuration file as data, as the repository reads it."""
    rope = job.model.first_attention.rope
    adam = {"name": "adamW", **_adam(job)}
    model = {**_llama(job.model), "rope_theta": None if rope is None else rope.rope_theta, "rope_interleaved": False}
    return {
        **_shared(job, layout, steps, model),
        "parallelism": {**_parallelism(job, layout), "recompute_layer": layout.recompute == "full"},
        "optimizer": {
            **_optimizer(job, layout, steps),
            "optimizer_factory": adam,
            "weight_decay_exclude_named_params": [".*norm.*", ".*bias"],
        },
        "data_stages": [{"name": "planned", "start_training_step": 1, "data": _data()}],
    }


def configuration_04(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """The configuration file as data, as release 0.4 reads it."""
    return {
        **_shared(job, layout, steps, _llama(job.model)),
        "parallelism": _parallelism(job, layout),
        "optimizer": {**_optimizer(job, layout, steps), **_adam(job)},
        "data": _data(),
    }


def _shared(job: Job, layout: Layout, steps: int, model: dict[str, Any]) -> dict[str, Any]:
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
    return {
        "dp": layout.dp,
        "pp": layout.pp,
        "tp": layout.tp,
        "expert_parallel_size": 1,
        "pp_engine": ENGINES.get(layout.schedule, "1f1b"),
        "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        "tp_linear_async_communication": job.engine.overlap_tp and layout.sequence_parallel,
    }


def _llama(model: ModelSpec) -> dict[str, Any]:
    found = alike(model)
    assert found is not None, "unsupported() refuses other models"
    assert found.dense is not None, "unsupported() refuses other models"
    eos = model.eos_token_id
    return {
        "is_llama_config": True,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": found.dense.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": found.attention.num_attention_heads,
        "num_key_value_heads": found.attention.num_key_value_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": found.dense.hidden_act,
        "initializer_range": model.initializer_range,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": 1 if model.bos_token_id is None else model.bos_token_id,
        "eos_token_id": 2 if eos is None else eos[0] if isinstance(eos, tuple) else eos,
        "pad_token_id": model.pad_token_id,
    }


def _optimizer(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    optim = job.optim
    return {
        "zero_stage": layout.zero,
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.grad_clip,
        "accumulate_grad_in_fp32": True,
        "learning_rate_scheduler": _learning_rate(job, steps),
    }


def _adam(job: Job) -> dict[str, Any]:
    optim = job.optim
    return {
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_eps": optim.eps,
        "torch_adam_is_fused": True,
    }


def _learning_rate(job: Job, steps: int) -> dict[str, Any]:
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
        "min_decay_lr": optim.lr if optim.schedule == "constant" else floor(optim),
    }


def _data() -> dict[str, Any]:
    return {"dataset": None, "seed": 42, "num_loading_workers": 1}
