"""Arguments of transformers' Trainer, shared by the exports to DeepSpeed and accelerate.

`HfArgumentParser` parses these arguments as TrainingArguments. Checked against transformers 4.57 and 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kumi.export.common import min_learning_rate, unsupported_value
from kumi.export.text import bash_array, command_line_options
from kumi.spec.job import Job
from kumi.spec.layout import Layout

# kumi's names of optimizers and of learning-rate schedules -> transformers' names.
OPTIMIZERS = {"adamw": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd"}
_SCHEDULES = {
    "constant": "constant_with_warmup",
    "cosine": "cosine_with_min_lr",
    "linear": "polynomial",
    "wsd": "warmup_stable_decay",
}


def unsupported_by_transformers(layout: Layout, trainer: str) -> Iterator[str]:
    """Yield why transformers' models do not support `layout`; `trainer` is the name of the trainer that shards them."""
    yield from unsupported_value(
        "recompute", layout.recompute, ("none", "full"), "transformers", "recomputes whole layers"
    )
    if layout.recompute == "full" and layout.recompute_layers is not None:
        yield f"recompute_layers={layout.recompute_layers}: transformers recomputes all layers or none; leave it out"
    if layout.tp > 1 and layout.sequence_parallel:
        yield (
            f"sequence_parallel with tp={layout.tp}: {trainer} does not shard activations along the sequence between "
            f"the tensor-parallel layers of transformers' models; set sequence_parallel = false"
        )


def shell_arguments(job: Job, layout: Layout, steps: int) -> str:
    """Return a bash array of arguments for a script with TrainingArguments, such as transformers' run_clm.py."""
    options = command_line_options(training_arguments(job, layout, steps))
    return bash_array("ARGS", {"TrainingArguments": options})


def training_arguments(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """Return fields of TrainingArguments: the plan's batch, precision, optimizer and recomputation."""
    optim = job.optim
    return {
        "output_dir": "out",
        "max_steps": steps,
        "per_device_train_batch_size": layout.microbatch,
        "gradient_accumulation_steps": job.batch.microbatches(layout),
        "bf16": _bool_text(job.precision.compute == "bfloat16"),
        "fp16": _bool_text(job.precision.compute == "float16"),
        "gradient_checkpointing": _bool_text(layout.recompute == "full"),
        "optim": OPTIMIZERS[optim.kind],
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "max_grad_norm": optim.grad_clip,
        "warmup_steps": optim.warmup_steps,
        "lr_scheduler_type": _SCHEDULES[optim.schedule],
        "lr_scheduler_kwargs": _schedule_options(job),
        "logging_steps": 1,
    }


def _bool_text(value: bool) -> str:
    return "true" if value else "false"


def _schedule_options(job: Job) -> str | None:
    """Return the options of the learning-rate schedule as JSON; None for a schedule without options."""
    optim = job.optim
    options: dict[str, dict[str, Any]] = {
        "cosine": {"min_lr": min_learning_rate(optim)},
        "linear": {"lr_end": min_learning_rate(optim), "power": 1.0},
        "wsd": {"num_decay_steps": optim.decay_steps, "decay_type": "linear", "min_lr_ratio": optim.min_lr_ratio},
    }
    return json.dumps(options[optim.schedule]) if optim.schedule in options else None


def unsupported_momentum(job: Job) -> Iterator[str]:
    """Yield a sentence if the job needs SGD with momentum, which transformers' Trainer does not have."""
    if job.optim.kind == "sgd" and job.optim.betas[0]:
        yield from unsupported_value(
            "optim.betas[0]", job.optim.betas[0], [0.0], "transformers' Trainer", "has sgd without momentum"
        )
