"""Export to accelerate: a configuration for FSDP2, and the launch command for a transformers training script.

Checked against accelerate 1.15: commands/{config/config_args,launch}.py, utils/dataclasses.py, parallelism_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kumi.export.hugging_face as hugging_face
from kumi.export.common import (
    nodes_and_devices,
    plan_title,
    reduces_in_16_bits,
    unsupported_offload,
    unsupported_optimizer,
    unsupported_precision,
    unsupported_value,
)
from kumi.export.text import as_comment, to_yaml
from kumi.spec.job import Job
from kumi.spec.layout import Layout

_NAME = "accelerate"
_FILE, _LAUNCH = "accelerate_fsdp.yaml", "accelerate_fsdp.sh"
_MACHINE_FLAGS = (
    '--machine_rank "${NODE_RANK:?}" --main_process_ip "${MASTER_ADDR:?}" --main_process_port "${MASTER_PORT:-29500}"'
)
# kumi's dtypes -> accelerate's names of mixed precision.
_MIXED_PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Return all reasons why accelerate does not support `layout` for `job`."""
    return [
        *_unsupported_degrees(layout),
        *unsupported_value(
            "zero", layout.zero, (0, 2, 3), _NAME, "shards gradients whenever it shards optimizer states (FSDP2)"
        ),
        *hugging_face.unsupported_by_transformers(layout, _NAME),
        *_unsupported_offload(layout),
        *unsupported_optimizer(job, hugging_face.OPTIMIZERS, _NAME + " under transformers' Trainer"),
        *hugging_face.unsupported_momentum(job),
        *unsupported_precision(job, _NAME, _MIXED_PRECISION),
    ]


def _unsupported_degrees(layout: Layout) -> Iterator[str]:
    """Check the degrees: pp and ep are not supported, tp, cp and replicas only with FSDP2."""
    if layout.pp > 1:
        yield f"pp={layout.pp}: {_NAME} has no pipeline parallelism for training; set pp = 1"
    if layout.ep > 1:
        yield f"ep={layout.ep}: {_NAME} has no expert parallelism; set ep = 1"
    if layout.zero == 0 and layout.tp * layout.cp > 1:
        yield (
            f"zero=0 with tp={layout.tp}, cp={layout.cp}: {_NAME} supports tp and cp only with FSDP2; "
            f"set zero = 3 and dp_shard > 1"
        )
    elif layout.tp * layout.cp > 1 and layout.dp_replicate > 1 and layout.dp_shard == 1:
        yield (
            f"dp_replicate={layout.dp_replicate} with tp={layout.tp}, cp={layout.cp}: {_NAME} has "
            f"replicas only with dp_shard > 1; set dp_shard = {layout.dp_replicate} and dp_replicate = 1"
        )
    elif layout.zero and layout.dp_shard * layout.cp == 1 and layout.world_size > 1:
        yield "dp_shard=1: FSDP2 has no ranks to shard over; set dp_shard > 1, or zero = 0"


def _unsupported_offload(layout: Layout) -> Iterator[str]:
    """Check the offloading, which needs FSDP2."""
    yield from unsupported_offload(layout, _NAME, ("states", "activations"))
    if layout.offload == "states" and layout.zero == 0:
        yield "offload=states with zero=0: FSDP2 offloads the states that it shards; set zero = 3"
    if layout.offload == "activations" and (layout.recompute != "full" or layout.zero == 0):
        yield (
            f"offload=activations: {_NAME} offloads the inputs of recomputed layers with FSDP2; set recompute = 'full' "
            f"and zero = 3"
        )


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """Return the configuration, and a shell file with the launch command."""
    head = [
        plan_title(job, layout, "accelerate (FSDP2)"),
        "The model, the data and the number of steps are not part of a plan: add arguments for your script.",
        "SCRIPT is a script with transformers' TrainingArguments, such as its run_clm.py.",
        *_notes(job, layout),
    ]
    nodes, _ = nodes_and_devices(job, layout)
    flags = "" if nodes == 1 else f"{_MACHINE_FLAGS} "
    launch = f'accelerate launch --config_file {_FILE} {flags}\\\n    "${{SCRIPT:-run_clm.py}}" "${{ARGS[@]}}" "$@"\n'
    arguments = hugging_face.shell_arguments(job, _without_recompute(layout), steps)
    return {
        _FILE: to_yaml(_configuration(job, layout), head),
        _LAUNCH: f"#!/usr/bin/env bash\n{as_comment(head)}set -euo pipefail\n\n{arguments}\n{launch}",
    }


def _without_recompute(layout: Layout) -> Layout:
    """Return `layout` for the script: if FSDP2 recomputes layers, the model must not do so as well."""
    return replace(layout, recompute="none") if layout.zero else layout


def _notes(job: Job, layout: Layout) -> list[str]:
    """Return the differences between the plan and what accelerate does."""
    if layout.zero and job.precision.compute != "float32" and not reduces_in_16_bits(job):
        return [
            f"Gradients: with mixed_precision {_MIXED_PRECISION[job.precision.compute]} FSDP2 reduces them in that "
            f"dtype, which halves the traffic; the plan reduces them in float32."
        ]
    return []


def _configuration(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the configuration file as data."""
    nodes, _ = nodes_and_devices(job, layout)
    kind = "FSDP" if layout.zero else "MULTI_GPU" if layout.world_size > 1 else "NO"
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": _MIXED_PRECISION[job.precision.compute],
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
    """Return the FSDP options. FSDP's units are the layers; accelerate reads their class from transformers' models."""
    offloads = layout.offload == "activations"
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": layout.offload == "states",
        "fsdp_activation_checkpointing": layout.recompute == "full",
        **({"fsdp_activation_checkpointing_offload": True} if offloads else {}),
    }


def _parallelism(layout: Layout) -> dict[str, Any]:
    sizes = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp, "cp": layout.cp}
    return {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
