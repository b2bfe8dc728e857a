"""Build Megatron-Core's TransformerConfig from megatron_bridge_recipe.py, without Megatron-Bridge.

The recipe runs with stand-ins for Bridge's classes. Its model provider is Megatron-Core's own configuration, without
the arguments that Bridge adds.
"""

import dataclasses
import importlib.util
import sys
import types

from launched import main

# Arguments of Bridge's providers that TransformerConfig does not have.
BRIDGE = {
    "position_embedding_type",
    "share_embeddings_and_output_weights",
    "vocab_size",
    "should_pad_vocab",
    "seq_length",
    "make_vocab_size_divisible_by",
    "rotary_base",
    "rotary_percent",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
}


def provider(config):
    """Return `config` as a model provider without Bridge's arguments; any other unknown argument is an error."""
    fields = {field.name for field in dataclasses.fields(config)}

    def provide(**arguments):
        # Needs Transformer Engine, and with it a GPU.
        return config(
            **{name: value for name, value in arguments.items() if name in fields or name not in BRIDGE},
            apply_rope_fusion=False,
        )

    return provide


def bridge():
    """Put stand-ins in place of Megatron-Bridge's modules."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    names = (
        "CheckpointConfig",
        "ConfigContainer",
        "DistributedDataParallelConfig",
        "DistributedInitConfig",
        "GPTDatasetConfig",
        "LoggerConfig",
        "OptimizerConfig",
        "SchedulerConfig",
        "TokenizerConfig",
        "TrainingConfig",
    )
    made = {
        "megatron.bridge": {},
        "megatron.bridge.models": {},
        "megatron.bridge.training": {},
        "megatron.bridge.training.config": dict.fromkeys(names, types.SimpleNamespace),
        "megatron.bridge.models.gpt_provider": {"GPTModelProvider": provider(TransformerConfig)},
        "megatron.bridge.models.mla_provider": {"MLAModelProvider": provider(MLATransformerConfig)},
    }
    for name, content in made.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        sys.modules[name] = module


def read(folder):
    import torch

    bridge()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    spec = importlib.util.spec_from_file_location("recipe", folder / "megatron_bridge_recipe.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.pretrain_config()
    model = config.model
    return {
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "ep": model.expert_model_parallel_size,
        "virtual": model.virtual_pipeline_model_parallel_size,
        "sequence_parallel": model.sequence_parallel,
        "microbatch": config.train.micro_batch_size,
        "sequences": config.train.global_batch_size,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "ffn": model.ffn_hidden_size,
        "heads": model.num_attention_heads,
        "kv_heads": model.num_query_groups,
        "experts": model.num_moe_experts,
        "recompute": [model.recompute_granularity, model.recompute_method, model.recompute_num_layers],
        "window": model.window_size,
    }


if __name__ == "__main__":
    main(read, ["megatron.core.transformer.transformer_config"])
