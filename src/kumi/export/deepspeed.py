"""DeepSpeed's ds_config.json, and the launch line of a script that trains a transformers model with it.

Read in deepspeed 0.19.8: runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py,
module_inject/auto_ep_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kumi.export.hugging_face as hugging_face
from kumi.export.common import machines, offload, optimizer, precision, reduces_in_half, title
from kumi.export.text import comment, to_json
from kumi.spec.job import Job
from kumi.spec.layout import Layout

NAME = "DeepSpeed"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FILE, LAUNCH = "ds_config.json", "deepspeed.sh"
# Families whose experts AutoEP finds by itself; it divides them over the data-parallel ranks.
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
# layout.offload -> device of the optimizer states, device of the parameters.
OFFLOAD = {
    "optimizer": ("cpu", None),
    "states": ("cpu", "cpu"),
    "optimizer-nvme": ("nvme", None),
    "states-nvme": ("nvme", "nvme"),
}


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Every reason why DeepSpeed's configuration alone cannot train `job` with `layout`."""
    return [
        *_degrees(job, layout),
        *hugging_face.problems(layout, NAME),
        *offload(layout, NAME, OFFLOAD),
        *_offload(layout),
        *optimizer(job, hugging_face.OPTIMIZERS, NAME + " under transformers' Trainer"),
        *hugging_face.momentum(job),
        *precision(job, NAME, ("bfloat16", "float16", "float32")),
    ]


def _degrees(job: Job, layout: Layout) -> Iterator[str]:
    if layout.pp > 1:
        yield f"pp={layout.pp}: {NAME} builds pipelines from a PipelineModule in the training script; set pp = 1"
    if layout.cp > 1:
        yield (
            f"cp={layout.cp}: {NAME} divides sequences (Ulysses) by calls in the training script, not in its "
            f"configuration; set cp = 1"
        )
    if layout.zero and layout.dp_replicate > 1:
        yield (
            f"dp_replicate={layout.dp_replicate} with zero={layout.zero}: {NAME} divides states over all data "
            f"ranks; set dp_shard = {layout.dp} and dp_replicate = 1"
        )
    yield from _experts(job, layout)


def _experts(job: Job, layout: Layout) -> Iterator[str]:
    if layout.ep == 1:
        return
    if job.model.family not in EXPERTS:
        yield f"ep={layout.ep}: {NAME}'s AutoEP knows {', '.join(EXPERTS)}, not {job.model.family}; set ep = 1"
    if layout.expert_tp > 1:
        yield f"expert_tp={layout.expert_tp}: {NAME}'s AutoEP keeps experts whole; set expert_tp = 1"
    if layout.dp % layout.ep:
        yield f"ep={layout.ep} does not divide dp={layout.dp}, whose ranks {NAME} gives experts to"
    if layout.tp > 1 or layout.offload != "none":
        yield f"ep={layout.ep} with tp or offload: {NAME}'s AutoEP goes with neither; set tp = 1 and offload = 'none'"


def _offload(layout: Layout) -> Iterator[str]:
    if layout.offload == "optimizer" and layout.zero == 0:
        yield f"offload=optimizer with zero=0: {NAME} moves states from ZeRO-1 on; set zero = 1"
    if layout.offload in ("states", "optimizer-nvme", "states-nvme") and layout.zero != 3:
        yield f"offload={layout.offload} with zero={layout.zero}: {NAME} does that with ZeRO-3; set zero = 3"


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """The configuration, and the launch line in a shell file."""
    head = [
        title(job, layout, NAME),
        "The model, the data and the number of steps are not part of a plan: give them to your script after these.",
        "SCRIPT is one that takes transformers' TrainingArguments, such as its run_clm.py.",
    ]
    nodes, per_node = machines(job, layout)
    hosts = "" if nodes == 1 else f'--hostfile "${{HOSTFILE:?}}" --num_nodes {nodes} '
    launch = (
        f'deepspeed {hosts}--num_gpus {per_node} "${{SCRIPT:-run_clm.py}}" \\\n'
        f'    --deepspeed {FILE} "${{ARGS[@]}}" "$@"\n'
    )
    shell = hugging_face.shell_arguments(job, layout, steps)
    return {
        FILE: to_json(configuration(job, layout)),
        LAUNCH: f"#!/usr/bin/env bash\n{comment(head)}set -euo pipefail\n\n{shell}\n{launch}",
    }


def configuration(job: Job, layout: Layout) -> dict[str, Any]:
    """ds_config.json as data."""
    half, wide = job.precision.compute == "bfloat16", job.engine.grad_itemsize == 4
    return {
        "train_batch_size": job.batch.sequences,
        "train_micro_batch_size_per_gpu": layout.microbatch,
        "gradient_accumulation_steps": job.batch.microbatches(layout),
        "gradient_clipping": job.optim.grad_clip,
        "steps_per_print": 1,
        "bf16": {"enabled": half},
        "fp16": {"enabled": job.precision.compute == "float16"},
        **({"data_types": {"grad_accum_dtype": "fp32"}} if half and layout.zero and wide else {}),
        "communication_data_type": DTYPES[job.precision.compute if reduces_in_half(job) else "float32"],
        **_optimizer(job),
        "zero_optimization": _zero(layout),
        **({"tensor_parallel": {"autotp_size": layout.tp}} if layout.tp > 1 else {}),
        **_expert_parallel(job, layout),
    }


def _optimizer(job: Job) -> dict[str, Any]:
    """AdamW is DeepSpeed's own, fused and ready for offload; others come from the Trainer."""
    optim = job.optim
    if optim.kind != "adamw":
        return {"zero_allow_untested_optimizer": True}
    params = {"lr": optim.lr, "betas": list(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}
    return {"optimizer": {"type": "AdamW", "params": params}}


def _zero(layout: Layout) -> dict[str, Any]:
    found: dict[str, Any] = {"stage": layout.zero}
    if layout.zero:
        found |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if layout.zero == 3:
        found |= {"stage3_gather_16bit_weights_on_model_save": True}
    states, params = OFFLOAD.get(layout.offload, (None, None))
    for name, device in (("offload_optimizer", states), ("offload_param", params)):
        if device is not None:
            path = {"nvme_path": "/local_nvme"} if device == "nvme" else {}
            found[name] = {"device": device, "pin_memory": True, **path}
    return found


def _expert_parallel(job: Job, layout: Layout) -> dict[str, Any]:
    if layout.ep == 1:
        return {}
    return {"expert_parallel": {"enabled": True, "autoep_size": layout.ep, "preset_model": job.model.family}}
