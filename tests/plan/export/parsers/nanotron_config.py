"""Read nanotron-0.4.yaml with get_config_from_file of the released nanotron 0.4."""

import contextlib
import sys
import types

from launched import main


def prepare():
    """Break the import cycle of release 0.4: its logging imports a class of its configuration."""
    package, module = types.ModuleType("nanotron.config"), types.ModuleType("nanotron.config.config")
    package.__path__ = []
    module.LoggingArgs = object
    sys.modules.update({"nanotron.config": package, "nanotron.config.config": module})
    try:
        import nanotron.logging  # noqa: F401
    finally:
        for name in ("nanotron.config", "nanotron.config.config"):
            del sys.modules[name]


def read(folder):
    from nanotron.config import get_config_from_file

    config = get_config_from_file(str(folder / "nanotron-0.4.yaml"))
    parallel, model = config.parallelism, config.model.model_config
    scheduler = config.optimizer.learning_rate_scheduler
    return {
        "dp": parallel.dp,
        "pp": parallel.pp,
        "tp": parallel.tp,
        "engine": type(parallel.pp_engine).__name__,
        "mode": parallel.tp_mode.name,
        "zero": config.optimizer.zero_stage,
        "microbatch": config.tokens.micro_batch_size,
        "microbatches": config.tokens.batch_accumulation_per_replica,
        "sequences": config.global_batch_size,
        "seq_len": config.tokens.sequence_length,
        "layers": model.num_hidden_layers,
        "hidden": model.hidden_size,
        "ffn": model.intermediate_size,
        "kv_heads": model.num_key_value_heads,
        "model": type(model).__name__,
        "dtype": str(config.model.dtype),
        "decay": [scheduler.lr_decay_starting_step, scheduler.lr_decay_steps],
    }


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        prepare()
    main(read, ["nanotron.config"])
