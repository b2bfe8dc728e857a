"""Read kumi_torchtitan.py with torchtitan's ConfigManager, and build the mesh, and the model on the meta device."""

import sys

from launched import command, main, processes


def read(folder):
    import torch
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    words = command(folder / "kumi_torchtitan.py")
    world = processes(words)
    sys.modules.pop("kumi_torchtitan", None)
    sys.path.insert(0, str(folder))
    try:
        config = ConfigManager().parse_args(words[words.index("--module") :])
    finally:
        sys.path.pop(0)
    dims = ParallelDims.from_config(config.parallelism, world)
    model = config.model_spec.model
    model.update_from_config(config=config)
    with torch.device("meta"):
        built = model.build()
    parts, parallel = config.parallelism.module_fqns_per_model_part, config.parallelism
    batch = config.training.local_batch_size
    get_schedule_class(parallel.pipeline_parallel_schedule)
    return {
        "world": dims.dp_replicate * dims.dp_shard * dims.cp * dims.tp * dims.pp,
        "dp_replicate": dims.dp_replicate,
        "dp_shard": dims.dp_shard,
        "tp": dims.tp,
        "pp": dims.pp,
        "cp": dims.cp,
        "ep": dims.ep,
        "reshard": parallel.fsdp_reshard_after_forward,
        "schedule": parallel.pipeline_parallel_schedule if dims.pp > 1 else None,
        "stages": None if parts is None else [sum(name.startswith("layers.") for name in part) for part in parts],
        "microbatch": parallel.pipeline_parallel_microbatch_size if dims.pp > 1 else batch,
        "microbatches": config.training.global_batch_size
        // (dims.dp_replicate * dims.dp_shard)
        // (parallel.pipeline_parallel_microbatch_size if dims.pp > 1 else batch),
        "accumulation": config.training.global_batch_size // (batch * dims.dp_replicate * dims.dp_shard),
        "sequences": config.training.global_batch_size,
        "seq_len": config.training.seq_len,
        "recompute": type(config.activation_checkpoint).__qualname__.split(".")[0],
        "compile": config.compile.enable,
        "params": sum(param.numel() for param in built.parameters()),
    }


if __name__ == "__main__":
    main(read, ["torchtitan.config", "torchtitan.trainer"])
