"""Read accelerate_fsdp.yaml with accelerate's launcher, and build FSDP2's plugin and the mesh from it."""

import os

from launched import launched, main


def read(folder):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    for name in [name for name in os.environ if name.startswith(("FSDP_", "PARALLELISM_CONFIG_"))]:
        del os.environ[name]
    file = str(folder / "accelerate_fsdp.yaml")
    config = load_config_from_file(file)
    start = launched(folder / "accelerate_fsdp.sh")
    words = [file if word == "accelerate_fsdp.yaml" else word for word in start["arguments"][1:]]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    values = {
        "world": args.num_processes,
        "nodes": args.num_machines,
        "mixed": config.mixed_precision,
        "kind": config.distributed_type.value,
        "script": args.training_script,
    }
    if not args.use_fsdp:
        return values | {"zero": 0}
    os.environ.update(
        {
            key: value
            for key, value in prepare_multi_gpu_env(args).items()
            if key.startswith(("FSDP_", "PARALLELISM_CONFIG_"))
        }
    )
    plugin, sizes = FullyShardedDataParallelPlugin(), ParallelismConfig()
    return values | {
        "zero": 3 if plugin.reshard_after_forward else 2,
        "version": plugin.fsdp_version,
        "dp_replicate": sizes.dp_replicate_size,
        "dp_shard": sizes.dp_shard_size,
        "tp": sizes.tp_size,
        "cp": sizes.cp_size,
        "total": sizes.total_size,
        "recompute": plugin.activation_checkpointing,
        "offload": type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "offload_activations": plugin.activation_checkpointing_offload,
        "wrap": getattr(plugin.auto_wrap_policy, "__name__", None),
    }


if __name__ == "__main__":
    main(read, ["accelerate"])
