"""One conversion by Megatron-Bridge on a CPU, for `convert.py`; run by a Python that has megatron-bridge 0.3.

    python convert_bridge.py HUGGING_FACE_FOLDER TARGET

Bridge imports TransformerEngine and other packages that need a GPU, but does not use them here: fake modules replace
them, and Megatron's calls for the current GPU and its random state return those of the CPU. The script builds the
Megatron model, fills it from the folder, and writes the weights as a Hugging Face folder.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

ABSENT = {
    "transformer_engine",
    "modelopt",
    "nvidia_resiliency_ext",
    "wandb",
    "mlflow",
    "qwen_vl_utils",
    "open_clip",
    "timm",
}
FUSIONS = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion",
)
# Megatron-Core modules that test for TransformerEngine: imported before the fake modules.
FIRST = (
    "models.gpt.gpt_layer_specs",
    "models.mamba",
    "ssm.mamba_mixer",
    "transformer.moe.experts",
    "optimizer",
    "distributed",
    "dist_checkpointing",
    "models.multimodal.llava_model",
    "transformer.multi_token_prediction",
    "transformer.cuda_graphs",
    "transformer.multi_latent_attention",
)


class StandIn(types.ModuleType):
    """A fake module that has every name, as functions without effect."""

    __path__ = ()

    def __call__(self, *given, **named):
        return None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].islower():
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            value = type(name, (), {"__init__": lambda self, *given, **named: None})
        setattr(self, name, value)
        return value


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def prepare():
    """Import Megatron-Core and Megatron-Bridge with the fake modules."""
    import torch

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *given: None
    for name in FIRST:
        importlib.import_module(f"megatron.core.{name}")
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    sys.meta_path.insert(0, Finder())
    importlib.import_module("megatron.bridge")


def work(source, target):
    import torch
    import torch.distributed as dist
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    dist.init_process_group("gloo")
    bridge = AutoBridge.from_hf_pretrained(source, torch_dtype=torch.bfloat16)
    provider = bridge.to_megatron_provider(load_weights=True)
    provider.params_dtype = provider.pipeline_dtype = torch.bfloat16
    provider.bf16, provider.fp16, provider.use_cpu_initialization = True, False, True
    provider.transformer_layer_spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    for name in FUSIONS:
        setattr(provider, name, False)
    provider.finalize()
    parallel_state.initialize_model_parallel()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_hf_weights(model, target)


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    prepare()
    from convert import timed

    print(json.dumps(timed(lambda: work(*sys.argv[1:]))), flush=True)
    os._exit(0)
