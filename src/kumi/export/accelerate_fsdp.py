"""accelerate's configuration for FSDP2, and the launch line of a script that trains a transformers model with it.

Read in accelerate 1.15: commands/{config/config_args,launch}.py, utils/dataclasses.py, parallelism_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kumi.export.hugging_face as hugging_face
from kumi.export.common import machines, offload, only, optimizer, precision, reduces_in_half, title
from kumi.export.text import comment, to_yaml
from kumi.spec.job import Job
from kumi.spec.layout import Layout

NAME = "accelerate"
FILE, LAUNCH = "accelerate_fsdp.yaml", "accelerate_fsdp.sh"
_WHERE = (
    '--machine_rank "${NODE_RANK:?}" --main_process_ip "${MASTER_ADDR:?}" --main_process_port "${MASTER_PORT:-29500}"'
)
MIXED = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Every reason why accelerate cannot train `job` with `layout`."""
    return [
        *_degrees(layout),
        *only("zero", layout.zero, (0, 2, 3), NAME, "divides gradients whenever it divides states (FSDP2)"),
        *hugging_face.problems(layout, NAME),
        *_offload(layout),
        *optimizer(job, hugging_face.OPTIMIZERS, NAME + " under transformers' Trainer"),
        *hugging_face.momentum(job),
        *precision(job, NAME, MIXED),
    ]


def _degrees(layout: Layout) -> Iterator[str]:
    if layout.pp > 1:
        yield f"pp={layout.pp}: {NAME} has no pipeline for training; set pp = 1"
    if layout.ep > 1:
        yield f"ep={layout.ep}: {NAME} has no expert parallelism; set ep = 1"
    if layout.zero == 0 and layout.tp * layout.cp > 1:
        yield (
            f"zero=0 with tp={layout.tp}, cp={layout.cp}: {NAME} combines tp and cp with FSDP2 only; "
            f"set zero = 3 and dp_shard > 1"
        )
    elif layout.tp * layout.cp > 1 and layout.dp_replicate > 1 and layout.dp_shard == 1:
        yield (
            f"dp_replicate={layout.dp_replicate} with tp={layout.tp}, cp={layout.cp}: {NAME} has copies "
            f"only where dp_shard > 1; set dp_shard = {layout.dp_replicate} and dp_replicate = 1"
        )
    elif layout.zero and layout.dp_shard * layout.cp == 1 and layout.world_size > 1:
        yield "dp_shard=1: FSDP2 has no ranks to divide over; set dp_shard > 1, or zero = 0"


def _offload(layout: Layout) -> Iterator[str]:
    yield from offload(layout, NAME, ("states", "activations"))
    if layout.offload == "states" and layout.zero == 0:
        yield "offload=states with zero=0: FSDP2 moves what it divides; set zero = 3"
    if layout.offload == "activations" and (layout.recompute != "full" or layout.zero == 0):
        yield (
            f"offload=activations: {NAME} moves the inputs of recomputed layers under FSDP2; set recompute = 'full' "
            f"and zero = 3"
        )


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """The configuration, and the launch line in a shell file."""
    head = [
        title(job, layout, "accelerate (FSDP2)"),
        "The model, the data and the number of steps are not part of a plan: give them to your script after these.",
        "SCRIPT is one that takes transformers' TrainingArguments, such as its run_clm.py.",
        *notes(job, layout),
    ]
    nodes, _ = machines(job, layout)
    where = "" if nodes == 1 else f"{_WHERE} "
    launch = f'accelerate launch --config_file {FILE} {where}\\\n    "${{SCRIPT:-run_clm.py}}" "${{ARGS[@]}}" "$@"\n'
    arguments = hugging_face.shell_arguments(job, _without_recompute(layout), steps)
    return {
        FILE: to_yaml(configuration(job, layout), head),
        LAUNCH: f"#!/usr/bin/env bash\n{comment(head)}set -euo pipefail\n\n{arguments}\n{launch}",
    }


def _without_recompute(layout: Layout) -> Layout:
    """`layout` for the script: where FSDP2 recomputes layers itself, the model must not do so as well."""
    return replace(layout, recompute="none") if layout.zero else layout


def notes(job: Job, layout: Layout) -> list[str]:
    """What accelerate does differently from the plan, though it carries it out."""
    if layout.zero and job.precision.compute != "float32" and not reduces_in_half(job):
        return [
            f"Gradients: under mixed_precision {MIXED[job.precision.compute]} FSDP2 reduces them in it, which the "
            f"plan does in float32; it halves their traffic."
        ]
    return []


def configuration(job: Job, layout: Layout) -> dict[str, Any]:
    """The configuration file as data."""
    nodes, _ = machines(job, layout)
    kind = "FSDP" if layout.zero else "MULTI_GPU" if layout.world_size > 1 else "NO"
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": MIXED[job.precision.compute],
        "num_machines": nodes,
        "num_processes": layout.world_size,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "use_cpu": False,
        **({"fsdp_config": _fsdp(layout), "parallelism_config": _parallelism(layout)} if layout.zero else {}),
    }


def _fsdp(layout: Layout) -> dict[str, Any]:
    """Layers are the units: transformers' models name the class of theirs themselves."""
    moved = layout.offload == "activations"
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": layout.offload == "states",
        "fsdp_activation_checkpointing": layout.recompute == "full",
        **({"fsdp_activation_checkpointing_offload": True} if moved else {}),
    }


def _parallelism(layout: Layout) -> dict[str, Any]:
    sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp, "cp": layout.cp}
    return {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
