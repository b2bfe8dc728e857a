"""Export to Megatron-Bridge: a recipe, which is a Python file that builds a ConfigContainer and trains with it.

The model is described by its sizes, as a GPTModelProvider (MLAModelProvider for latent attention), which extends
Megatron-Core's own configuration. Checked against megatron-bridge 0.3.1 and 0.6.2: training/config.py,
models/gpt_provider.py.
"""

from __future__ import annotations

from typing import Any

import kumi.export.megatron_limits as megatron
import kumi.megatron.layout_fields as megatron_layout
import kumi.megatron.model_fields as megatron_model
from kumi.export.common import SYNTHETIC_DATA, min_learning_rate, plan_title, reduces_in_16_bits, torchrun_command
from kumi.export.text import PythonCode, as_comment, python_call
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import LatentAttention

_FILE = "megatron_bridge_recipe.py"
_TORCH_DTYPES = {
    "bfloat16": PythonCode("torch.bfloat16"),
    "float16": PythonCode("torch.float16"),
    "float32": PythonCode("torch.float32"),
}
_ACTIVATIONS = {
    "silu": PythonCode("torch.nn.functional.silu"),
    "gelu": PythonCode("torch.nn.functional.gelu"),
    "squared_relu": PythonCode("squared_relu"),
}


def unsupported(job: Job, layout: Layout) -> list[str]:
    """Return all reasons why Megatron-Bridge does not support `layout` for `job`."""
    reasons = megatron.unsupported_by_megatron(job, layout)
    if job.optim.kind == "muon":
        reasons.append("optim.kind=muon: kumi does not write Megatron-Bridge's separate muon setup; use adamw or sgd")
    return reasons


def files(job: Job, layout: Layout, steps: int) -> dict[str, str]:
    """Return the recipe."""
    head = [
        plan_title(job, layout, "Megatron-Bridge"),
        f"$ {torchrun_command(job, layout)} {_FILE}",
        SYNTHETIC_DATA,
        *megatron.megatron_notes(job, layout),
    ]
    provider = "MLAModelProvider" if _is_latent(job) else "GPTModelProvider"
    arguments = _model_arguments(job, layout)
    squared = arguments["activation_func"] == _ACTIVATIONS["squared_relu"]
    sections = {name: python_call(kind, values, 8) for name, (kind, values) in _sections(job, layout, steps).items()}
    text = _TEMPLATE.format(
        head=as_comment(head),
        provider=provider,
        module="mla_provider" if _is_latent(job) else "gpt_provider",
        squared=_SQUARED if squared else "",
        model=python_call(provider, arguments, 8),
        **sections,
    )
    return {_FILE: text}


def _is_latent(job: Job) -> bool:
    return isinstance(job.model.first_attention, LatentAttention)


def _model_arguments(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the keyword arguments of the model provider."""
    fields = megatron_model.model_config_fields(job.model)
    fields["activation_func"] = _ACTIVATIONS[fields["activation_func"]]
    parallel = megatron_layout.layout_config_fields(job, layout)
    dtype = _TORCH_DTYPES[job.precision.compute]
    return {
        **fields,
        **_positions(job),
        "share_embeddings_and_output_weights": job.model.tie_word_embeddings,
        "vocab_size": job.model.vocab_size,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": megatron_layout.VOCAB_MULTIPLE,
        "seq_length": job.batch.seq_len,
        **parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }


def _positions(job: Job) -> dict[str, Any]:
    """Return the provider's arguments for positions, without RoPE's options that `model_config_fields` returns."""
    rope = job.model.first_attention.rope
    if rope is None:
        return {"position_embedding_type": "learned_absolute" if job.model.learned_positions else "none"}
    if _is_latent(job):
        return {"position_embedding_type": "rope"}
    fields: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope.rope_theta,
        "rotary_percent": rope.partial_rotary_factor,
    }
    if rope.scaling == "llama3":
        fields |= {"rope_scaling": True, "rope_scaling_factor": rope.factor}
    if rope.scaling == "linear":
        fields |= {"seq_len_interpolation_factor": rope.factor}
    return fields


def _sections(job: Job, layout: Layout, steps: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the other sections of the container: name -> (class, keyword arguments)."""
    return {
        "train": (
            "TrainingConfig",
            {"train_iters": steps, "micro_batch_size": layout.microbatch, "global_batch_size": job.batch.sequences},
        ),
        "optimizer": ("OptimizerConfig", _optimizer(job, layout)),
        "scheduler": ("SchedulerConfig", _scheduler(job, steps)),
        "ddp": ("DistributedDataParallelConfig", _data_parallel(job, layout)),
        "dataset": (
            "GPTDatasetConfig",
            {
                "seq_length": job.batch.seq_len,
                "random_seed": 1234,
                "blend": None,
                "split": "1,0,0",
                "reset_position_ids": False,
                "reset_attention_mask": False,
                "eod_mask_loss": False,
                "num_workers": 1,
            },
        ),
        "tokenizer": ("TokenizerConfig", {"tokenizer_type": "NullTokenizer", "vocab_size": job.model.vocab_size}),
        "checkpoint": ("CheckpointConfig", {"save": None, "ckpt_format": _checkpoint_format(layout)}),
        "dist": ("DistributedInitConfig", {"use_megatron_fsdp": layout.zero > 1}),
    }


def _checkpoint_format(layout: Layout) -> str:
    return "fsdp_dtensor" if layout.zero > 1 else "torch_dist"


def _data_parallel(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the distributed optimizer for ZeRO-1, or Megatron-FSDP for ZeRO-2 and 3, with dp_replicate replicas."""
    fsdp = {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": megatron_layout.FSDP_SHARDING.get(layout.zero),
    }
    gathers = layout.zero > 0 and layout.dp_shard * layout.cp > 1
    overlap = layout.dp * layout.cp > 1 and job.engine.overlap_grads
    replicas = {"num_distributed_optimizer_instances": layout.dp_replicate}
    return {
        "use_distributed_optimizer": layout.zero > 0,
        **(fsdp if layout.zero > 1 else {}),
        **(replicas if layout.zero and layout.dp_replicate > 1 else {}),
        "grad_reduce_in_fp32": not reduces_in_16_bits(job),
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and gathers and job.engine.overlap_params,
    }


def _optimizer(job: Job, layout: Layout) -> dict[str, Any]:
    """Return the arguments of OptimizerConfig."""
    optim, offloads = job.optim, layout.offload == "optimizer"
    return {
        "optimizer": megatron_layout.OPTIMIZERS[optim.kind],
        "lr": optim.lr,
        "min_lr": min_learning_rate(optim),
        "weight_decay": optim.weight_decay,
        "clip_grad": optim.grad_clip,
        **(
            {"sgd_momentum": optim.betas[0]}
            if optim.kind == "sgd"
            else {"adam_beta1": optim.betas[0], "adam_beta2": optim.betas[1], "adam_eps": optim.eps}
        ),
        "bf16": job.precision.compute == "bfloat16",
        "fp16": job.precision.compute == "float16",
        "params_dtype": _TORCH_DTYPES[job.precision.compute],
        "use_distributed_optimizer": layout.zero > 0,
        **(
            {
                "optimizer_cpu_offload": True,
                "use_precision_aware_optimizer": True,
                "overlap_cpu_optimizer_d2h_h2d": True,
            }
            if offloads
            else {}
        ),
    }


def _scheduler(job: Job, steps: int) -> dict[str, Any]:
    """Return the arguments of SchedulerConfig."""
    optim = job.optim
    wsd = {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": optim.decay_steps} if optim.schedule == "wsd" else {}
    return {
        "lr_decay_style": megatron_layout.LR_STYLES[optim.schedule],
        **wsd,
        "lr_warmup_iters": min(optim.warmup_steps, steps - 1),
        "start_weight_decay": optim.weight_decay,
        "end_weight_decay": optim.weight_decay,
        "weight_decay_incr_style": "constant",
    }


_SQUARED = "from megatron.core.activations import squared_relu\n"
_TEMPLATE = '''{head}
import torch
{squared}from megatron.bridge.models.{module} import {provider}
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)


def pretrain_config() -> ConfigContainer:
    """The planned run."""
    return ConfigContainer(
        model={model},
        train={train},
        optimizer={optimizer},
        scheduler={scheduler},
        ddp={ddp},
        dataset={dataset},
        tokenizer={tokenizer},
        checkpoint={checkpoint},
        dist={dist},
        logger=LoggerConfig(log_interval=1),
    )


if __name__ == "__main__":
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(pretrain_config(), forward_step)
'''
