"""Export to DeepSpeed: ds_config.json, and the launch command for a transformers training script.

Checked against deepspeed 0.19.8: runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py,
module_inject/auto_ep_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kumi.export.hugging_face as hugging_face
from kumi.export.common import (
    nodes_and_devices,
    plan_title,
    reduces_in_16_bits,
    unsupported_offload,
    unsupported_optimizer,
    unsupported_precision,
)
from kumi.export.text import as_comment, to_json
from kumi.spec.job import Job
from kumi.spec.layout import Layout

_NAME = "DeepSpeed"
# kumi's dtypes -> DeepSpeed's.
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FILE, _LAUNCH = "ds_config.json", "deepspeed.sh"
# Families whose experts AutoEP detects and distributes over the data-parallel ranks.
_AUTOEP_FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
# layout.offload -> (device of the optimizer states, device of the parameters)
_OFFLOAD_DEVICES = {
    "optimizer": ("cpu", None),
    "states": ("cpu", "cpu"),
    "optimizer-nvme": ("nvme", None),
    "states-nvme": ("nvme", "nvme"),
}


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Return all reasons why DeepSpeed does not support `layout` for `job` by its configuration alone."""
    return [
        *_unsupported_degrees(job, layout),
        *hugging_face.unsupported_by_transformers(layout, _NAME),
        *unsupported_offload(layout, _NAME, _OFFLOAD_DEVICES),
        *_unsupported_offload(layout),
        *unsupported_optimizer(job, hugging_face.OPTIMIZERS, _NAME + " under transformers' Trainer"),
        *hugging_face.unsupported_momentum(job),
        *unsupported_precision(job, _NAME, ("bfloat16", "float16", "float32")),
    ]


def _unsupported_degrees(job: Job, layout: Layout) -> Iterator[str]:
    """Check the degrees: DeepSpeed's configuration has no pp and no cp, and replicas only without ZeRO."""
    if layout.pp > 1:
        yield f"pp={layout.pp}: {_NAME} builds pipelines from a PipelineModule in the training script; set pp = 1"
    if layout.cp > 1:
        yield (
            f"cp={layout.cp}: {_NAME} shards sequences (Ulysses) by calls in the training script, not by its "
            f"configuration; set cp = 1"
        )
    if layout.zero and layout.dp_replicate > 1:
        yield (
            f"dp_replicate={layout.dp_replicate} with zero={layout.zero}: {_NAME} shards states over all data "
            f"ranks; set dp_shard = {layout.dp} and dp_replicate = 1"
        )
    yield from _unsupported_experts(job, layout)


def _unsupported_experts(job: Job, layout: Layout) -> Iterator[str]:
    """Check ep and expert_tp for AutoEP, by which DeepSpeed distributes experts."""
    if layout.ep == 1:
        return
    if job.model.family not in _AUTOEP_FAMILIES:
        yield (
            f"ep={layout.ep}: {_NAME}'s AutoEP supports {', '.join(_AUTOEP_FAMILIES)}, not {job.model.family}; "
            f"set ep = 1"
        )
    if layout.expert_tp > 1:
        yield f"expert_tp={layout.expert_tp}: {_NAME}'s AutoEP does not shard single experts; set expert_tp = 1"
    if layout.dp % layout.ep:
        yield f"ep={layout.ep}: {_NAME} distributes experts over dp={layout.dp} ranks; set ep to a divisor of this"
    if layout.tp > 1 or layout.offload != "none":
        yield f"ep={layout.ep} with tp or offload: {_NAME}'s AutoEP supports neither; set tp = 1 and offload = 'none'"


def _unsupported_offload(layout: Layout) -> Iterator[str]:
    """Check that the ZeRO stage shards what is offloaded."""
    if layout.offload == "optimizer" and layout.zero == 0:
        yield f"offload=optimizer with zero=0: {_NAME} offloads states from ZeRO-1 on; set zero = 1"
    if layout.offload in ("states", "optimizer-nvme", "states-nvme") and layout.zero != 3:
        yield f"offload={layout.offload} with zero={layout.zero}: {_NAME} offloads these only with ZeRO-3; set zero = 3"


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """Return the configuration, and a shell file with the launch command."""
    head = [
        plan_title(job, layout, _NAME),
        "The model, the data and the number of steps are not part of a plan: add arguments for your script.",
        "SCRIPT is a script with transformers' TrainingArguments, such as its run_clm.py.",
    ]
    nodes, per_node = nodes_and_devices(job, layout)
    hosts = "" if nodes == 1 else f'--hostfile "${{HOSTFILE:?}}" --num_nodes {nodes} '
    launch = (
        f'deepspeed {hosts}--num_gpus {per_node} "${{SCRIPT:-run_clm.py}}" \\\n'
        f'    --deepspeed {_FILE} "${{ARGS[@]}}" "$@"\n'
    )
    shell = hugging_face.shell_arguments(job, layout, steps)
    return {
        _FILE: to_json(_configuration(job, layout)),
        _LAUNCH: f"#!/usr/bin/env bash\n{as_comment(head)}set -euo pipefail\n\n{shell}\n{launch}",
    }


def _configuration(job: Job, layout: Layout) -> dict[str, Any]:
    """Return ds_config.json as data."""
    bf16, float32_grads = job.precision.compute == "bfloat16", job.engine.grad_itemsize == 4
    return {
        "train_batch_size": job.batch.sequences,
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": job.batch.microbatches(layout),
        "gradient_clipping": job.optim.grad_clip,
        "steps_per_print": 1,
        "bf16": {"enabled": bf16},
        "fp16": {"enabled": job.precision.compute == "float16"},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if bf16 and layout.zero and float32_grads else {}),
        "communication_data_type": _DTYPES[job.precision.compute if reduces_in_16_bits(job) else "float32"],
        **_optimizer(job),
        "zero_optimization": _zero(layout),
        **({"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp > 1 else {}),
        **_expert_parallel(job, layout),
    }


def _optimizer(job: Job) -> dict[str, Any]:
    """Return DeepSpeed's AdamW, which is fused and supports offloading; for other kinds, the Trainer's optimizer."""
    optim = job.optim
    if optim.kind != "adamw":
        return {"zero_allow_untested_optimizer": True}
    params = {"lr": optim.lr, "betas": list(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}
    return {"optimizer": {"type": "AdamW", "params": params}}


def _zero(layout: Layout) -> dict[str, Any]:
    """Return the section for ZeRO, with the devices to which states and parameters are offloaded."""
    options: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        options |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if layout.zero == 3:
        options |= {"stage3_gather_16bit_weights_on_model_save": True}
    states, params = _OFFLOAD_DEVICES.get(layout.offload, (None, None))
    for name, device in (("offload_optimizer", states), ("offload_param", params)):
        if device is not None:
            path = {"nvme_path": "/local_nvme"} if device == "nvme" else {}
            options[name] = {"device": device, "pin_memory": True, **path}
    return options


def _expert_parallel(job: Job, layout: Layout) -> dict[str, Any]:
    if layout.ep == 1:
        return {}
    return {"expert_parallel": {"enabled": True, "autoep_size": layout.ep, "preset_model": job.model.family}}
