"""torchtitan's train step on one GPU, beside kumi's: its Llama 3, loss, optimizer, compilation and recomputation.

Written for torchtitan 0.2, the last that works with PyTorch 2.11. Every part is torchtitan's own. Its Trainer, which
needs a tokenizer and a data set, is left out: `TitanStep` makes the same calls in the same order.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def _import_llama3() -> ModuleType:
    """Import torchtitan's Llama 3. Without `datasets`, which its readers of text need, they get an empty stand-in."""
    if find_spec("datasets") is None:
        stand_in = ModuleType("torchtitan.hf_datasets.text_datasets")
        for name in ("build_text_dataloader", "build_text_validation_dataloader"):
            setattr(stand_in, name, None)
        sys.modules.setdefault(stand_in.__name__, stand_in)
    import torchtitan.models.llama3 as llama3

    return llama3


def model_args(config: dict[str, Any]) -> Any:
    """Return torchtitan's arguments of the model that a config.json describes.

    torchtitan computes the MLP's width as a multiple of two thirds of four times the hidden size. The factor is chosen
    so that the width is that of `config`.
    """
    llama3 = _import_llama3()
    from torchtitan.models.llama3.model.args import RoPEScalingArgs

    scaling = config.get("rope_scaling") or {"factor": 1.0}  # dividing frequencies by 1 leaves them
    names = {
        "factor": "scaling_factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
    }
    return llama3.TransformerModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        multiple_of=1,
        ffn_dim_multiplier=(config["intermediate_size"] + 0.5) / int(8 * config["hidden_size"] / 3),
        norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        rope_scaling_args=RoPEScalingArgs(**{names[key]: scaling[key] for key in scaling if key in names}),
    )


def job_config(*, seq_len: int, microbatch: int, recompute: str, compile: bool, precision: str) -> Any:
    """Return torchtitan's configuration of the job; `precision` is that of matmuls, "bfloat16" or "float32"."""
    from torchtitan.config import JobConfig

    job = JobConfig()
    job.training.seq_len, job.training.local_batch_size = seq_len, microbatch
    job.training.mixed_precision_param = precision
    job.compile.enable = compile
    job.activation_checkpoint.mode = recompute
    job.activation_checkpoint.selective_ac_option = "op"  # as in torchtitan's llama3_8b.toml
    job.optimizer.lr = 3e-4
    return job


class TitanStep:
    """A train step of torchtitan's Llama 3 on random weights and one batch; called, it returns the loss before it.

    By default the precision is that of torchtitan 0.2 on one device: float32 weights under autocast. With `fsdp` it is
    that of torchtitan on several devices, and of 0.3 on one, too: FSDP, here on a mesh of one rank, casts the weights.
    Raise ValueError for `fsdp` of a model with tied embeddings, which torchtitan 0.2 does not have.
    """

    def __init__(
        self,
        config: dict[str, Any],
        batch: tuple[Tensor, Tensor],
        device: torch.device,
        *,
        recompute: str = "none",
        compile: bool = False,
        precision: str = "bfloat16",
        fsdp: bool = False,
    ) -> None:
        if fsdp and config["tie_word_embeddings"]:
            raise ValueError("torchtitan 0.2 has no FSDP of a model with tied embeddings; take a shape without, as 8b")
        llama3 = _import_llama3()
        from torchtitan.distributed import ParallelDims, utils
        from torchtitan.tools.utils import GarbageCollection

        self.ids, self.labels = (part.to(device) for part in batch)
        microbatch, seq_len = batch[0].shape
        spec = llama3.get_train_spec()
        self.job = job_config(
            seq_len=seq_len, microbatch=microbatch, recompute=recompute, compile=compile, precision=precision
        )
        args = model_args(config)
        args.update_from_config(self.job)
        alone = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
        with torch.device("meta"):
            model = spec.model_cls(args)
        model = spec.parallelize_fn(model, alone, self.job)
        if fsdp:
            _shard_alone(model, device, self.job)
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights()
        if config["tie_word_embeddings"]:  # torchtitan 0.2 does not tie them; 0.3 does, as here
            model.tok_embeddings.weight = model.output.weight
        self.model: nn.Module = model.train()
        self.args = args
        self.loss = spec.build_loss_fn(self.job, parallel_dims=alone)
        self.optimizers = spec.build_optimizers_fn([model], self.job.optimizer, alone)
        self.context = utils.get_train_context(False)
        sharded = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=2)
        self.amp = utils.maybe_enable_amp(sharded if fsdp else alone, precision, device.type)
        self.valid_tokens = torch.tensor(float(self.labels.numel()), device=device)
        self.clip = utils.clip_grad_norm_
        self.garbage, self.steps = GarbageCollection(gc_freq=self.job.training.gc_freq), 0

    def __call__(self) -> Tensor:
        """Make one update and return its loss."""
        self.steps += 1
        self.garbage.run(self.steps)
        self.optimizers.zero_grad()
        with self.context():
            with self.amp:
                logits = self.model(self.ids)
                loss = self.loss(logits, self.labels) / self.valid_tokens
            del logits
            loss.backward()
        self.clip(list(self.model.parameters()), self.job.training.max_norm, foreach=True, pp_mesh=None)
        self.optimizers.step()
        return loss.detach()


def _shard_alone(model: nn.Module, device: torch.device, job: Any) -> None:
    """Apply torchtitan's FSDP on a mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    if not torch.distributed.is_initialized():
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backends, store=torch.distributed.HashStore(), rank=0, world_size=1)
    apply_fsdp(
        model,
        init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",)),
        param_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[job.training.mixed_precision_reduce],
        pp_enabled=False,
    )
