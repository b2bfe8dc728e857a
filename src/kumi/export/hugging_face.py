"""What training with transformers' Trainer shares, whether DeepSpeed or accelerate carries it: its arguments.

`HfArgumentParser` reads them for TrainingArguments. Read in transformers 4.57 and 5.23.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kumi.export.common import floor, only
from kumi.export.text import arguments, bash_array
from kumi.spec.job import Job
from kumi.spec.layout import Layout

OPTIMIZERS = {"adamw": "adamw_torch", "adamw-8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd"}
SCHEDULES = {
    "constant": "constant_with_warmup",
    "cosine": "cosine_with_min_lr",
    "linear": "polynomial",
    "wsd": "warmup_stable_decay",
}


def problems(layout: Layout, trainer: str) -> Iterator[str]:
    """What transformers' models do not do, whoever divides them."""
    yield from only("recompute", layout.recompute, ("none", "full"), "transformers", "recomputes whole layers")
    if layout.recompute == "full" and layout.recompute_layers is not None:
        yield f"recompute_layers={layout.recompute_layers}: transformers recomputes all layers or none"
    if layout.tp > 1 and layout.sequence_parallel:
        yield (
            f"sequence_parallel with tp={layout.tp}: {trainer} keeps whole sequences between the tensor-parallel "
            f"regions of transformers' models; set sequence_parallel = false"
        )


def shell_arguments(job: Job, layout: Layout, steps: int) -> str:
    """A bash array of the arguments of a script that has TrainingArguments, such as transformers' run_clm.py."""
    return bash_array("ARGS", {"TrainingArguments": arguments(training_arguments(job, layout, steps))})


def training_arguments(job: Job, layout: Layout, steps: int) -> dict[str, Any]:
    """Fields of TrainingArguments: batch, precision, optimizer and recomputation of the plan."""
    optim = job.optim
    return {
        "output_dir": "out",
        "max_steps": steps,
        "per_device_train_batch_size": layout.microbatch,
        "gradient_accumulation_steps": job.batch.microbatches(layout),
        "bf16": _truth(job.precision.compute == "bfloat16"),
        "fp16": _truth(job.precision.compute == "float16"),
        "gradient_checkpointing": _truth(layout.recompute == "full"),
        "optim": OPTIMIZERS[optim.kind],
        "learning_rate": optim.lr,
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "max_grad_norm": optim.grad_clip,
        "warmup_steps": optim.warmup_steps,
        "lr_scheduler_type": SCHEDULES[optim.schedule],
        "lr_scheduler_kwargs": _schedule_options(job),
        "logging_steps": 1,
    }


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _schedule_options(job: Job) -> str | None:
    optim = job.optim
    own: dict[str, dict[str, Any]] = {
        "cosine": {"min_lr": floor(optim)},
        "linear": {"lr_end": floor(optim), "power": 1.0},
        "wsd": {"num_decay_steps": optim.decay_steps, "decay_type": "linear", "min_lr_ratio": optim.min_lr_ratio},
    }
    return json.dumps(own[optim.schedule]) if optim.schedule in own else None


def momentum(job: Job) -> Iterator[str]:
    """A sentence where transformers' SGD, which has none by itself, would need a momentum."""
    if job.optim.kind == "sgd" and job.optim.betas[0]:
        yield from only(
            "optim.betas[0]", job.optim.betas[0], [0.0], "transformers' Trainer", "has sgd without momentum"
        )
