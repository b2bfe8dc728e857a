"""Megatron-LM's command line: a shell file of the arguments of pretrain_gpt.py, with the launch line at its end.

Read in megatron/training/arguments.py as megatron-core 0.19.2 ships it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kumi.export.megatron_limits as megatron
import kumi.megatron.layout_fields as megatron_layout
import kumi.megatron.model_fields as megatron_model
from kumi.export.common import MADE_UP, floor, only, reduces_in_half, title, torchrun
from kumi.export.text import arguments, bash_array, comment
from kumi.megatron.args import ARGUMENTS, BUILT_IN
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import LatentAttention, Rope
from kumi.spec.uniform_layers import alike, runs

FILE = "megatron_lm.sh"
# Arguments written as a Python list expression.
PATTERNS = ("moe_layer_freq", "window_attn_skip_freq")


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Every reason why Megatron-LM cannot train `job` with `layout`."""
    return [*megatron.unsupported(job, layout), *_rope_problems(job)]


def _rope_problems(job: Job) -> Iterator[str]:
    found = alike(job.model)
    if found is None or found.attention.rope is None:
        return
    attention, rope = found.attention, found.attention.rope
    if rope.rope_theta != int(rope.rope_theta):
        yield f"rope_theta={rope.rope_theta}: Megatron-LM's --rotary-base is a whole number"
    if isinstance(attention, LatentAttention) and rope.scaling == "yarn":
        for name, value in BUILT_IN.items():
            yield from only(name, getattr(rope, name), [value], "Megatron-LM", "has it built in for latent attention")


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """The shell file."""
    head = [
        title(job, layout, "Megatron-LM"),
        "Run it in the folder of Megatron-LM, on every node.",
        MADE_UP,
        *megatron.notes(job, layout),
    ]
    groups = {name: arguments(options) for name, options in options(job, layout, steps).items()}
    launch = f'{torchrun(job, layout)} \\\n    pretrain_gpt.py "${{ARGS[@]}}" "$@"\n'
    # Megatron orders tensor-parallel kernels by it; Megatron-FSDP overlaps only without it.
    connections = "unset CUDA_DEVICE_MAX_CONNECTIONS" if layout.zero > 1 else "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    body = f"set -euo pipefail\n{connections}\n\n{bash_array('ARGS', groups)}\n{launch}"
    return {FILE: f"#!/usr/bin/env bash\n{comment(head)}{body}"}


def options(job: Job, layout: Layout, steps: int) -> dict[str, dict[str, Any]]:
    """The arguments by title, each as name and value; True is a bare flag."""
    parallel = megatron_layout.fields(job, layout)
    mixed = {name: parallel.pop(name) for name in ("bf16", "fp16")}
    recompute = {name: parallel.pop(name) for name in list(parallel) if name.startswith("recompute")}
    return {
        "model": {**_model(job), **_vocabulary(job)},
        "parallel arrangement": {**_named(parallel), **_data_parallel(job, layout)},
        "recomputation and offload": {**_named(recompute), **_offload(layout)},
        "batch": {
            "seq-length": job.batch.seq_len,
            "micro-batch-size": layout.microbatch,
            "global-batch-size": job.batch.sequences,
            "train-iters": steps,
        },
        "precision": {
            **mixed,
            "grad-reduce-in-bf16": job.precision.compute == "bfloat16" and reduces_in_half(job),
            "no-gradient-accumulation-fusion": layout.zero > 1 or job.precision.compute == "float32",
        },
        "optimizer": _optimizer(job, steps),
        "data: put your own here": {
            "mock-data": True,
            "split": "1,0,0",
            "eval-iters": 0,
            "log-interval": 1,
            "log-throughput": True,
        },
    }


def _named(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of TransformerConfig under the names of their arguments."""
    found = {}
    for name, value in fields.items():
        if name in PATTERNS:
            value = runs(value)
        found[ARGUMENTS.get(name, name).replace("_", "-")] = value
    return found


def _model(job: Job) -> dict[str, Any]:
    fields = megatron_model.fields(job.model)
    latent = fields.get("multi_latent_attention", False)
    activation, gated, bias = (fields.pop(name) for name in ("activation_func", "gated_linear_unit", "add_bias_linear"))
    window, kv = fields.pop("window_size", None), fields.get("num_query_groups")
    for name in ("rotary_base", *BUILT_IN):
        fields.pop(name, None)
    return {
        **_named(fields),
        "group-query-attention": not latent and kv != fields["num_attention_heads"],
        "num-query-groups": kv if not latent and kv != fields["num_attention_heads"] else None,
        "swiglu": gated,
        "squared-relu": activation == "squared_relu",
        "disable-bias-linear": not bias,
        "window-size": None if window is None else ",".join(map(str, window)),
        "max-position-embeddings": max(job.model.max_position_embeddings, job.batch.seq_len),
        **_positions(job),
    }


def _positions(job: Job) -> dict[str, Any]:
    attention = job.model.first_attention
    if attention.rope is None:
        return {"position-embedding-type": "learned_absolute" if job.model.learned_positions else "none"}
    found = {"position-embedding-type": "rope", "rotary-base": int(attention.rope.rope_theta)}
    return found if isinstance(attention, LatentAttention) else found | _scaling(attention.rope)


def _scaling(rope: Rope) -> dict[str, Any]:
    return {
        "rotary-percent": rope.partial_rotary_factor,
        "use-rope-scaling": rope.scaling == "llama3",
        "rope-scaling-factor": rope.factor if rope.scaling == "llama3" else None,
        "rotary-seq-len-interpolation-factor": int(rope.factor) if rope.scaling == "linear" else None,
    }


def _vocabulary(job: Job) -> dict[str, Any]:
    return {
        "untie-embeddings-and-output-weights": not job.model.tie_word_embeddings,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": job.model.vocab_size,
        "make-vocab-size-divisible-by": megatron_layout.VOCAB_MULTIPLE,
    }


def _data_parallel(job: Job, layout: Layout) -> dict[str, Any]:
    """ZeRO-1 is the distributed optimizer, ZeRO-2 and 3 Megatron-FSDP; dp_replicate copies of either."""
    fsdp, gathers = layout.zero > 1, layout.zero > 0 and layout.dp_shard * layout.cp > 1
    overlap = layout.dp * layout.cp > 1 and job.engine.overlap_grads
    return {
        "use-distributed-optimizer": layout.zero > 0,
        "use-megatron-fsdp": fsdp,
        "data-parallel-sharding-strategy": megatron_layout.FSDP.get(layout.zero),
        "init-model-with-meta-device": layout.zero == 3,
        "num-distributed-optimizer-instances": layout.dp_replicate if layout.zero and layout.dp_replicate > 1 else None,
        "ckpt-format": "fsdp_dtensor" if fsdp else "torch_dist",
        "overlap-grad-reduce": overlap,
        "overlap-param-gather": overlap and gathers and job.engine.overlap_params,
    }


def _offload(layout: Layout) -> dict[str, Any]:
    moved = layout.offload == "optimizer"
    return {
        "optimizer-cpu-offload": moved,
        "use-precision-aware-optimizer": moved,
        "overlap-cpu-optimizer-d2h-h2d": moved,
    }


def _optimizer(job: Job, steps: int) -> dict[str, Any]:
    optim = job.optim
    adam = {"adam-beta1": optim.betas[0], "adam-beta2": optim.betas[1], "adam-eps": optim.eps}
    own = {"sgd": {"sgd-momentum": optim.betas[0]}, "muon": {"muon-momentum": optim.betas[0]} | adam}
    wsd = {"lr-wsd-decay-style": "linear", "lr-wsd-decay-iters": optim.decay_steps} if optim.schedule == "wsd" else {}
    return {
        "optimizer": megatron_layout.OPTIMIZERS[optim.kind],
        "lr": optim.lr,
        "min-lr": floor(optim),
        "lr-decay-style": megatron_layout.LR_STYLES[optim.schedule],
        **wsd,
        "lr-warmup-iters": min(optim.warmup_steps, steps - 1),
        "weight-decay": optim.weight_decay,
        "clip-grad": optim.grad_clip,
        **own.get(optim.kind, adam),
    }
