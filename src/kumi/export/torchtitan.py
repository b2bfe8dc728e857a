"""Export to torchtitan: a Python module with a function that returns a Trainer.Config.

The model is built from torchtitan's own layers: its Llama 3, or its Qwen 3 if the model has QK norm.
Checked against torchtitan 0.3.0: config/configs.py, trainer.py, distributed/, models/{common,llama3,qwen3}; torch 2.13:
distributed/pipelining/schedules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kumi.export.common import (
    plan_title,
    torchrun_command,
    unsupported_offload,
    unsupported_optimizer,
    unsupported_precision,
    unsupported_value,
)
from kumi.export.text import PythonCode, as_comment, python_call
from kumi.export.torchtitan_model import torchtitan_model_code, unsupported_model
from kumi.spec import schedules
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.sharding import stage_bounds

_NAME = "torchtitan"
_FILE = "kumi_torchtitan.py"
# kumi's pipeline schedules -> torchtitan's.
_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe": "DualPipeV",
}
# ZeRO stage -> fsdp_reshard_after_forward. FSDP2 has no counterpart of ZeRO-1.
_RESHARD = {0: "default", 2: "never", 3: "always"}
# What the plan recomputes -> torchtitan's configuration of activation checkpointing.
_RECOMPUTE = {
    "none": PythonCode("None"),
    "selective": PythonCode("SelectiveAC.Config()"),
    "full": PythonCode("FullAC.Config()"),
}


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Return all reasons why torchtitan does not support `layout` for `job`."""
    return [
        *unsupported_model(job.model),
        *unsupported_value(
            "zero", layout.zero, _RESHARD, _NAME, "shards gradients whenever it shards optimizer states (FSDP2)"
        ),
        *_unsupported_schedule(job, layout),
        *_unsupported_degrees(job, layout),
        *_unsupported_recompute(layout),
        *unsupported_offload(layout, _NAME, ("states",)),
        *unsupported_optimizer(job, ("adamw",), _NAME),
        *unsupported_precision(job, _NAME, ("bfloat16", "float32")),
        *unsupported_value(
            "precision.reduce", job.precision.reduce, ["float32"], _NAME, "reduces gradients in float32"
        ),
    ]


def _unsupported_schedule(job: Job, layout: Layout) -> Iterator[str]:
    """Check the pipeline schedule, its stages, and for tied embeddings."""
    if layout.pp == 1:
        return
    if layout.schedule not in _SCHEDULES:
        yield from unsupported_value("schedule", layout.schedule, _SCHEDULES, _NAME, "does not have it")
        return
    schedule = schedules.SCHEDULES[layout.schedule]
    if not schedule.more_stages and layout.stages != schedule.stages:
        yield (
            f"stages={layout.stages} with schedule={layout.schedule}: {_NAME} runs it with {schedule.stages} per rank; "
            f"set stages = {schedule.stages}"
        )
    elif not schedule.takes_stages(layout.stages):
        yield (
            f"stages={layout.stages} with schedule={layout.schedule}: {_NAME} needs {schedule.stages} or more; "
            f"set schedule = '1f1b'"
        )
    yield from _unsupported_microbatches(job.batch.microbatches(layout), layout)
    if job.model.tie_word_embeddings:
        yield f"pp={layout.pp} with tied embeddings: {_NAME} does not keep their copies identical; set pp = 1"


def _unsupported_microbatches(count: int, layout: Layout) -> Iterator[str]:
    """Check the number of microbatches, `count`, that a rank has in a step."""
    rounds = max(1, count // layout.pp)
    if layout.schedule == "interleaved" and count % rounds:
        yield (
            f"{count} microbatches: {_NAME} interleaves {rounds} rounds of the same size; use a multiple of "
            f"pp={layout.pp}"
        )
    if layout.schedule == "dualpipe" and count < 2 * layout.pp:
        yield f"{count} microbatches: {_NAME}'s DualPipeV needs at least one for each of {2 * layout.pp} stages"


def _unsupported_degrees(job: Job, layout: Layout) -> Iterator[str]:
    """Check that tp, cp and ep divide heads, sequences and ranks, and that expert_tp is 1."""
    heads = {layer.attends.num_key_value_heads for layer in job.model.layers if layer.attends is not None}
    if any(count % layout.tp for count in heads):
        yield f"tp={layout.tp} does not divide num_key_value_heads={min(heads)}, as {_NAME} requires; use a divisor"
    parts = (layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1)
    if job.batch.seq_len % parts:
        yield f"seq_len={job.batch.seq_len}: {_NAME} splits it into {parts} parts; use a multiple of {parts}"
    if layout.expert_tp > 1:
        yield f"expert_tp={layout.expert_tp}: {_NAME} does not shard single experts; set expert_tp = 1"
    if layout.ep > 1 and layout.dp_shard * layout.cp * layout.tp % layout.ep:
        yield (
            f"ep={layout.ep} does not divide dp_shard x cp x tp = {layout.dp_shard * layout.cp * layout.tp}, the "
            f"ranks over which {_NAME} distributes experts; use a divisor"
        )


def _unsupported_recompute(layout: Layout) -> Iterator[str]:
    if layout.recompute != "none" and layout.recompute_layers is not None:
        yield f"recompute_layers={layout.recompute_layers}: {_NAME} recomputes in all layers or in none"


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """Return the module."""
    head = [
        plan_title(job, layout, _NAME),
        f"$ {torchrun_command(job, layout)} -m torchtitan.train --module {_FILE.removesuffix('.py')} --config planned",
        "Add this folder to PYTHONPATH. Tokenizer (--hf_assets_path), data (--dataloader.dataset) and steps "
        "(--training.steps) are not part of a plan.",
    ]
    sections = {
        "training": ("TrainingConfig", _training(job, layout, steps)),
        "parallelism": ("ParallelismConfig", _parallelism(job.model, layout)),
        "lr_scheduler": ("LRSchedulersContainer.Config", _learning_rate(job, steps)),
    }
    calls = {name: python_call(kind, values, 8) for name, (kind, values) in sections.items()}
    optim = job.optim
    body = _TEMPLATE.format(
        head=as_comment(head),
        recompute=""
        if layout.recompute == "none"
        else f"from torchtitan.distributed.activation_checkpoint import {_RECOMPUTE[layout.recompute].split('.')[0]}\n",
        model=torchtitan_model_code(job.model),
        loss=_CHUNKED if job.engine.logit_bytes == 0 else _PLAIN,
        wrapper="ChunkedLossWrapper, " if job.engine.logit_bytes == 0 else "",
        optimizer=python_call(
            "default_adamw",
            {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay},
            8,
        ),
        activation_checkpoint=_RECOMPUTE[layout.recompute],
        compiled=job.engine.kernels == "compiled",
        **calls,
    )
    return {_FILE: body}


def _training(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """Return the arguments of TrainingConfig.

    A pipeline takes all sequences of a rank and splits them into microbatches; otherwise gradients are accumulated.
    """
    sequences = layout.microbatch * (job.batch.microbatches(layout) if layout.pp > 1 else 1)
    return {
        "local_batch_size": sequences,
        "global_batch_size": job.batch.sequences,
        "seq_len": job.batch.seq_len,
        "steps": steps,
        "max_norm": job.optim.grad_clip,
        "mixed_precision_param": job.precision.compute,
        "mixed_precision_reduce": job.precision.reduce,
        "enable_cpu_offload": layout.offload == "states",
        "disable_cuda_graphs": layout.pp > 1 or layout.ep > 1 or layout.offload == "states",
    }


def _parallelism(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    """Return the keyword arguments of ParallelismConfig."""
    arguments: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "fsdp_reshard_after_forward": _RESHARD[layout.zero],
        "context_parallel_degree": layout.cp,
        "tensor_parallel_degree": layout.tp,
        "enable_sequence_parallel": layout.sequence_parallel,
        "expert_parallel_degree": layout.ep,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp == 1:
        return arguments
    return arguments | {
        "pipeline_parallel_schedule": _SCHEDULES[layout.schedule],
        "pipeline_parallel_microbatch_size": layout.microbatch,
        "module_fqns_per_model_part": PythonCode(_stage_code(stage_bounds(layout, model.num_hidden_layers))),
    }


def _stage_code(stages: tuple[tuple[int, int], ...]) -> str:
    """Return code of a list of the module names of each stage, with layers as ranges."""
    rows = []
    for index, (first, last) in enumerate(stages):
        parts = ["'tok_embeddings'"] if index == 0 else []
        parts += [f"*(f'layers.{{i}}' for i in range({first}, {last}))"] if last > first else []
        parts += ["'norm'", "'lm_head'"] if index == len(stages) - 1 else []
        rows.append(f"                [{', '.join(parts)}],\n")
    return f"[\n{''.join(rows)}            ]"


def _learning_rate(job: Job, steps: int) -> dict[str, Any]:
    """Return the arguments of LRSchedulersContainer.Config."""
    optim = job.optim
    ratio = {"constant": 0.0, "wsd": optim.decay_steps / steps}.get(optim.schedule)
    return {
        "warmup_steps": optim.warmup_steps,
        "decay_ratio": ratio,
        "decay_type": "cosine" if optim.schedule == "cosine" else "linear",
        "min_lr_factor": optim.min_lr_ratio,
    }


# The loss of logits in memory as a whole, and that of logits computed chunk by chunk.
_PLAIN = "CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)"
_CHUNKED = f"ChunkedLossWrapper.Config(loss_fn={_PLAIN})"
_TEMPLATE = """{head}
from functools import partial

from torch import nn
from torchtitan.components.loss import {wrapper}CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
{recompute}from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer
{model}

def planned() -> Trainer.Config:
    \"\"\"The planned run.\"\"\"
    spec = model_spec()
    model = spec.model
    return Trainer.Config(
        model_spec=spec,
        loss={loss},
        optimizer={optimizer},
        lr_scheduler={lr_scheduler},
        training={training},
        parallelism={parallelism},
        activation_checkpoint={activation_checkpoint},
        compile=CompileConfig(enable={compiled}),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
    )
"""
