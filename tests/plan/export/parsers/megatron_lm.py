"""Read megatron_lm.sh with Megatron-LM's parse_args and validate_args, and build its TransformerConfig."""

import contextlib
import os
import sys

from launched import launched, main, processes


def read(folder):
    import torch
    from megatron.training import argument_utils, arguments

    start = launched(folder / "megatron_lm.sh")
    words = start["arguments"]
    script = words.index("pretrain_gpt.py")
    os.environ["WORLD_SIZE"] = str(processes(words[:script]))
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if start["connections"]:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = start["connections"]
    # A Hopper device, as far as the checks go.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    arguments.get_device_arch_version = lambda: 9
    sys.argv = ["pretrain_gpt.py", *words[script + 1 :]]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        args = arguments.parse_args()
        arguments.validate_args(args)
        args.apply_rope_fusion = False  # needs Transformer Engine, and with it a GPU
        config = argument_utils.core_transformer_config_from_args(args)
    return {
        "world": args.world_size,
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "cp": config.context_parallel_size,
        "ep": config.expert_model_parallel_size,
        "dp": args.data_parallel_size,
        "virtual": args.virtual_pipeline_model_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "microbatch": args.micro_batch_size,
        "sequences": args.global_batch_size,
        "seq_len": args.seq_length,
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "ffn": config.ffn_hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_query_groups,
        "experts": config.num_moe_experts,
        "moe_layers": _count(config.moe_layer_freq, config.num_layers) if config.num_moe_experts else 0,
        "distributed_optimizer": args.use_distributed_optimizer,
        "fsdp": args.data_parallel_sharding_strategy if args.use_megatron_fsdp else None,
        "instances": args.num_distributed_optimizer_instances,
        "recompute": [config.recompute_granularity, config.recompute_method, config.recompute_num_layers],
        "dtype": str(args.params_dtype),
        "lr": args.lr,
        "stages": _stages(config),
        "window": config.window_size,
        "windows": config.window_attn_skip_freq,
    }


def _count(frequency, layers):
    return sum(frequency) if isinstance(frequency, list) else layers // frequency


def _stages(config):
    """Return the layers of every stage, if they are listed."""
    stages = config.pipeline_model_parallel_layout
    if stages is None:
        return None
    layout = stages.layout
    return [
        sum(str(layer).endswith("decoder") for layer in layout[rank][chunk])
        for chunk in range(len(layout[0]))
        for rank in range(len(layout))
    ]


if __name__ == "__main__":
    main(read, ["megatron.core", "megatron.training.arguments"])
