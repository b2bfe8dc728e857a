"""Read ds_config.json with DeepSpeedConfig, with as many data-parallel ranks as the launch command starts."""

import json
import os
from itertools import pairwise

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from launched import launched, main


def read(folder):
    from deepspeed.module_inject.auto_ep_config import validate_autoep_config
    from deepspeed.runtime.config import DeepSpeedConfig

    raw = json.loads((folder / "ds_config.json").read_text())
    start = launched(folder / "deepspeed.sh")
    words = dict(pairwise(start["arguments"]))
    world = int(words.get("--num_nodes", 1)) * int(words["--num_gpus"])
    tp = raw.get("tensor_parallel", {}).get("autotp_size", 1)

    class Ranks:
        """The part of a process group interface that DeepSpeed uses: the number of data-parallel ranks."""

        def get_data_parallel_world_size(self):
            return world // tp

    os.environ.update(RANK="0", WORLD_SIZE=str(world))
    import deepspeed.comm as comm

    comm.get_rank = lambda *_: 0
    config = DeepSpeedConfig(str(folder / "ds_config.json"), mpu=Ranks())
    experts = config.expert_parallel_config
    if experts is not None and experts.enabled:
        validate_autoep_config(experts, world, 1, tp, 1, zero_stage=config.zero_optimization_stage)
    zero = config.zero_config
    return {
        "world": world,
        "dp": config.world_size,
        "tp": config.tensor_parallel_config.autotp_size or 1,
        "ep": experts.autoep_size if experts is not None and experts.enabled else 1,
        "zero": int(config.zero_optimization_stage),
        "microbatch": config.train_micro_batch_size_per_gpu,
        "microbatches": config.gradient_accumulation_steps,
        "sequences": config.train_batch_size,
        "bf16": config.bfloat16_config.enabled,
        "fp16": config.float16_config.enabled,
        "clip": config.gradient_clipping,
        "optimizer": config.optimizer_name,
        "lr": (config.optimizer_params or {}).get("lr"),
        "offload_optimizer": _device(zero.offload_optimizer),
        "offload_param": _device(zero.offload_param),
        "script": start["arguments"][start["arguments"].index("--deepspeed") - 1],
    }


def _device(section):
    return None if section is None else str(getattr(section.device, "value", section.device))


if __name__ == "__main__":
    main(read, ["deepspeed"])
