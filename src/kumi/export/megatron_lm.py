"""Export to Megatron-LM: a shell file with the arguments of pretrain_gpt.py and the launch command.

Checked against megatron/training/arguments.py in megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kumi.export.megatron_limits as megatron
import kumi.megatron.layout_fields as megatron_layout
import kumi.megatron.model_fields as megatron_model
from kumi.export.common import (
    SYNTHETIC_DATA,
    min_learning_rate,
    plan_title,
    reduces_in_16_bits,
    torchrun_command,
    unsupported_value,
)
from kumi.export.text import as_comment, bash_array, command_line_options
from kumi.megatron.args import ARGUMENT_NAMES, MLA_DEFAULTS
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import LatentAttention, Rope
from kumi.spec.uniform_layers import as_repeated_lists, uniform_layers

_FILE = "megatron_lm.sh"
# Arguments with one value per layer, written as a Python list expression.
_LAYER_PATTERNS = ("moe_layer_freq", "window_attn_skip_freq")


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Return all reasons why Megatron-LM does not support `layout` for `job`."""
    return [*megatron.unsupported_by_megatron(job, layout), *_unsupported_rope(job)]


def _unsupported_rope(job: Job) -> Iterator[str]:
    """Check for values of RoPE that Megatron-LM has no argument for."""
    layers = uniform_layers(job.model)
    if layers is None or layers.attention.rope is None:
        return
    attention, rope = layers.attention, layers.attention.rope
    if rope.rope_theta != int(rope.rope_theta):
        yield f"rope_theta={rope.rope_theta}: Megatron-LM's --rotary-base must be an integer"
    if isinstance(attention, LatentAttention) and rope.scaling == "yarn":
        for name, value in MLA_DEFAULTS.items():
            yield from unsupported_value(
                name, getattr(rope, name), [value], "Megatron-LM", "has it built in for latent attention"
            )


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """Return the shell file."""
    head = [
        plan_title(job, layout, "Megatron-LM"),
        "Run it in the Megatron-LM folder, on every node.",
        SYNTHETIC_DATA,
        *megatron.megatron_notes(job, layout),
    ]
    groups = {name: command_line_options(options) for name, options in argument_groups(job, layout, steps).items()}
    launch = f'{torchrun_command(job, layout)} \\\n    pretrain_gpt.py "${{ARGS[@]}}" "$@"\n'
    # One connection orders Megatron's tensor-parallel kernels; Megatron-FSDP overlaps only without this limit.
    connections = "unset CUDA_DEVICE_MAX_CONNECTIONS" if layout.zero > 1 else "export CUDA_DEVICE_MAX_CONNECTIONS=1"
    body = f"set -euo pipefail\n{connections}\n\n{bash_array('ARGS', groups)}\n{launch}"
    return {_FILE: f"#!/usr/bin/env bash\n{as_comment(head)}{body}"}


def argument_groups(job: Job, layout: Layout, steps: int) -> dict[str, dict[str, Any]]:
    """Return the arguments (name -> value) in groups by title; True is a flag without value."""
    parallel = megatron_layout.layout_config_fields(job, layout)
    mixed = {name: parallel.pop(name) for name in ("bf16", "fp16")}
    recompute = {name: parallel.pop(name) for name in list(parallel) if name.startswith("recompute")}
    return {
        "model": {**_model(job), **_vocabulary(job)},
        "parallelism": {**_argument_names(parallel), **_data_parallel(job, layout)},
        "recomputation and offload": {**_argument_names(recompute), **_offload(layout)},
        "batch": {
            "seq-length": job.batch.seq_len,
            "micro-batch-size": layout.microbatch,
            "global-batch-size": job.batch.sequences,
            "train-iters": steps,
        },
        "precision": {
            **mixed,
            "grad-reduce-in-bf16": job.precision.compute == "bfloat16" and reduces_in_16_bits(job),
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


def _argument_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of TransformerConfig under the names of their command-line arguments."""
    arguments = {}
    for name, value in fields.items():
        if name in _LAYER_PATTERNS:
            value = as_repeated_lists(value)
        arguments[ARGUMENT_NAMES.get(name, name).replace("_", "-")] = value
    return arguments


def _model(job: Job) -> dict[str, Any]:
    """Return the arguments for the model, without those for its vocabulary."""
    fields = megatron_model.model_config_fields(job.model)
    latent = fields.get("multi_latent_attention", False)
    activation, gated, bias = (fields.pop(name) for name in ("activation_func", "gated_linear_unit", "add_bias_linear"))
    window, kv = fields.pop("window_size", None), fields.get("num_query_groups")
    for name in ("rotary_base", *MLA_DEFAULTS):
        fields.pop(name, None)
    return {
        **_argument_names(fields),
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
    """Return the arguments for positions."""
    attention = job.model.first_attention
    if attention.rope is None:
        return {"position-embedding-type": "learned_absolute" if job.model.learned_positions else "none"}
    rope = {"position-embedding-type": "rope", "rotary-base": int(attention.rope.rope_theta)}
    return rope if isinstance(attention, LatentAttention) else rope | _scaling(attention.rope)


def _scaling(rope: Rope) -> dict[str, Any]:
    """Return the arguments for partial RoPE and its scaling."""
    return {
        "rotary-percent": rope.partial_rotary_factor,
        "use-rope-scaling": rope.scaling == "llama3",
        "rope-scaling-factor": rope.factor if rope.scaling == "llama3" else None,
        "rotary-seq-len-interpolation-factor": int(rope.factor) if rope.scaling == "linear" else None,
    }


def _vocabulary(job: Job) -> dict[str, Any]:
    """Return the arguments for the vocabulary, with a tokenizer for synthetic data."""
    return {
        "untie-embeddings-and-output-weights": not job.model.tie_word_embeddings,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": job.model.vocab_size,
        "make-vocab-size-divisible-by": megatron_layout.VOCAB_MULTIPLE,
    }


def _data_parallel(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the distributed optimizer for ZeRO-1, or Megatron-FSDP for ZeRO-2 and 3, with dp_replicate replicas."""
    fsdp, gathers = layout.zero > 1, layout.zero > 0 and layout.dp_shard * layout.cp > 1
    overlap = layout.dp * layout.cp > 1 and job.engine.overlap_grads
    return {
        "use-distributed-optimizer": layout.zero > 0,
        "use-megatron-fsdp": fsdp,
        "data-parallel-sharding-strategy": megatron_layout.FSDP_SHARDING.get(layout.zero),
        "init-model-with-meta-device": layout.zero == 3,
        "num-distributed-optimizer-instances": layout.dp_replicate if layout.zero and layout.dp_replicate > 1 else None,
        "ckpt-format": "fsdp_dtensor" if fsdp else "torch_dist",
        "overlap-grad-reduce": overlap,
        "overlap-param-gather": overlap and gathers and job.engine.overlap_params,
    }


def _offload(layout: Layout) -> dict[str, Any]:
    """Return the arguments for offloading the optimizer."""
    offloads = layout.offload == "optimizer"
    return {
        "optimizer-cpu-offload": offloads,
        "use-precision-aware-optimizer": offloads,
        "overlap-cpu-optimizer-d2h-h2d": offloads,
    }


def _optimizer(job: Job, steps: int) -> dict[str, Any]:
    """Return the arguments for the optimizer and the learning rate."""
    optim = job.optim
    adam = {"adam-beta1": optim.betas[0], "adam-beta2": optim.betas[1], "adam-eps": optim.eps}
    special = {"sgd": {"sgd-momentum": optim.betas[0]}, "muon": {"muon-momentum": optim.betas[0]} | adam}
    wsd = {"lr-wsd-decay-style": "linear", "lr-wsd-decay-iters": optim.decay_steps} if optim.schedule == "wsd" else {}
    return {
        "optimizer": megatron_layout.OPTIMIZERS[optim.kind],
        "lr": optim.lr,
        "min-lr": min_learning_rate(optim),
        "lr-decay-style": megatron_layout.LR_STYLES[optim.schedule],
        **wsd,
        "lr-warmup-iters": min(optim.warmup_steps, steps - 1),
        "weight-decay": optim.weight_decay,
        "clip-grad": optim.grad_clip,
        **special.get(optim.kind, adam),
    }
