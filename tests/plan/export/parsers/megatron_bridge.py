"""Run megatron_bridge_recipe.py with Megatron-Bridge's own classes, and validate its ConfigContainer.

Bridge imports packages whose installation needs a GPU. A configuration does not use them, so stand-ins replace those
that are missing.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types

from launched import command, main, processes

# Imported first, so that Megatron-Core itself still sees what is missing.
FIRST = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.training.arguments",
    "megatron.core.ssm.mamba_mixer",
    "megatron.core.transformer.moe.experts",
)
ABSENT = (
    "transformer_engine",
    "modelopt",
    "nvidia_resiliency_ext",
    "wandb",
    "mlflow",
    "qwen_vl_utils",
    "open_clip",
    "timm",
    "megatron.energon",
    "diffusers",
    "peft",
    "mamba_ssm",
    "causal_conv1d",
    "fla",
    "comet_ml",
    "flashinfer",
)


class StandIn(types.ModuleType):
    """A module with every name: lower-case names are submodules, upper-case names empty classes."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (), {"__init__": lambda self, *_, **__: None})
        setattr(self, name, made)
        return made

    def __call__(self, *_, **__):
        return None


class Finder:
    """Find a stand-in for absent packages and their submodules."""

    def find_spec(self, name, path=None, target=None):
        if any(name == root or name.startswith(root + ".") for root in missing):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


missing: list = []


def prepare():
    """Put stand-ins in place of missing packages. Raise ImportError if Megatron-Bridge itself is missing."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        raise ImportError("megatron-bridge is not installed")
    import torch

    asked = importlib.metadata.version
    # Some settings are refused without a recent Transformer Engine.
    importlib.metadata.version = lambda name: "2.12.0" if name == "transformer-engine" else asked(name)
    torch.cuda.current_device = lambda: "cpu"
    for name in FIRST:
        # Packages that are not installed get a stand-in below, or raise an error when used.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in ABSENT:
        try:
            there = importlib.util.find_spec(name) is not None
        except ImportError:
            there = False
        if not there:
            missing.append(name)
    sys.meta_path.append(Finder())


def read(folder):
    path = folder / "megatron_bridge_recipe.py"
    world = processes(command(path))
    os.environ["WORLD_SIZE"] = str(world)
    spec = importlib.util.spec_from_file_location("recipe", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.pretrain_config()
    model = config.model
    model.apply_rope_fusion = False  # needs Transformer Engine, and with it a GPU
    config.validate()
    return {
        "world": world,
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "ep": model.expert_model_parallel_size,
        "dp": config.data_parallel_size,
        "virtual": model.virtual_pipeline_model_parallel_size,
        "sequence_parallel": model.sequence_parallel,
        "microbatch": config.train.micro_batch_size,
        "sequences": config.train.global_batch_size,
        "seq_len": model.seq_length,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "heads": model.num_attention_heads,
        "kv_heads": model.num_query_groups,
        "experts": model.num_moe_experts,
        "distributed_optimizer": config.ddp.use_distributed_optimizer,
        "fsdp": config.ddp.data_parallel_sharding_strategy if config.ddp.use_megatron_fsdp else None,
        "instances": config.ddp.num_distributed_optimizer_instances,
        "recompute": [model.recompute_granularity, model.recompute_method, model.recompute_num_layers],
        "dtype": str(model.params_dtype),
        "lr": config.optimizer.lr,
        "window": model.window_size,
    }


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        prepare()
    main(read, ["megatron.core", "megatron.bridge.training.config"])
