"""Every export, read by the trainer's own code if its package is installed.

Each check is a script in `parsers/` and runs in a forked child, since these packages change global state.
"""

import json
import runpy
import sys
from itertools import product
from pathlib import Path

import pytest
from export_jobs import EXAMPLES

from forked import run_forked
from kumi.export import export
from kumi.export.hugging_face import OPTIMIZERS
from kumi.spec.ledger import num_params
from kumi.spec.sharding import stage_bounds

PARSERS = Path(__file__).parent / "parsers"
MISSING = 77
STEPS = 200


def parsed(script, trainers, folder, include=lambda files: True):
    """Return the values that trainers read in the exports of all supported examples: (trainer, name) -> values."""
    names = []
    for trainer, (name, (work, layout, able)) in product(trainers, EXAMPLES.items()):
        files = export(work, layout, trainer, steps=STEPS) if trainer in able else {}
        if files and include(files):
            names.append((trainer, name))
            (folder / trainer / name).mkdir(parents=True)
            for file, text in files.items():
                (folder / trainer / name / file).write_text(text)
    assert names
    code, stdout, stderr = run_forked(run_script, script, *(folder / trainer / name for trainer, name in names))
    if code == MISSING:
        pytest.skip(stdout.strip())
    assert code == 0, stderr[-3000:]
    return dict(zip(names, json.loads(stdout.splitlines()[-1]), strict=True))


def run_script(script, *folders):
    """Run a script in `parsers/` as the program of this process."""
    sys.argv = [str(PARSERS / f"{script}.py"), *map(str, folders)]
    sys.path.insert(0, str(PARSERS))
    runpy.run_path(sys.argv[0], run_name="__main__")


def degrees(layout, *axes):
    return {axis: getattr(layout, axis) for axis in axes}


def agree(values, expected):
    """Assert that `values` has all items of `expected`."""
    assert {key: values.get(key) for key in expected} == expected


def megatron(name):
    """Return the values that Megatron must read for the example `name`."""
    work, layout, _ = EXAMPLES[name]
    full, some = layout.recompute == "full", layout.recompute_layers
    return {
        **degrees(layout, "tp", "pp", "cp", "ep", "microbatch"),
        "virtual": layout.stages if layout.stages > 1 else None,
        "sequence_parallel": layout.tp > 1 and layout.sequence_parallel,
        "sequences": work.batch.sequences,
        "layers": work.model.num_hidden_layers,
        "hidden": work.model.hidden_size,
        "heads": work.model.layers[0].attention.num_attention_heads,
        "kv_heads": work.model.layers[0].attention.num_key_value_heads,
        "recompute": ["full", "block" if some else "uniform", some // layout.stages if some else 1]
        if full
        else [None if layout.recompute == "none" else "selective", None, None],
    }


def test_megatron_core_builds_its_configuration(tmp_path):
    for (_, name), values in parsed("megatron_core", ["megatron-bridge"], tmp_path).items():
        agree(values, megatron(name))


@pytest.mark.parametrize(
    ("script", "trainer"), [("megatron_lm", "megatron-lm"), ("megatron_bridge", "megatron-bridge")]
)
def test_megatron_reads_and_validates_the_run(tmp_path, script, trainer):
    for (_, name), values in parsed(script, [trainer], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        fsdp = {2: "optim_grads", 3: "optim_grads_params"}.get(layout.zero)
        agree(
            values,
            megatron(name)
            | {
                "world": layout.world_size,
                "dp": layout.dp,
                "seq_len": work.batch.seq_len,
                "lr": work.optim.lr,
                "distributed_optimizer": layout.zero > 0,
                "fsdp": fsdp,
                "instances": layout.dp_replicate if layout.zero else 1,
                "dtype": f"torch.{work.precision.compute}",
            },
        )
        if values.get("stages"):
            assert values["stages"] == [
                last - first for first, last in stage_bounds(layout, work.model.num_hidden_layers)
            ]


def test_deepspeed_reads_the_configuration(tmp_path):
    for (_, name), values in parsed("deepspeed_config", ["deepspeed"], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        agree(
            values,
            {
                **degrees(layout, "dp", "tp", "ep", "zero", "microbatch"),
                "world": layout.world_size,
                "sequences": work.batch.sequences,
                "microbatches": work.batch.microbatches(layout),
                "bf16": work.precision.compute == "bfloat16",
                "fp16": work.precision.compute == "float16",
                "lr": work.optim.lr if work.optim.kind == "adamw" else None,
                "offload_param": {"states": "cpu", "states-nvme": "nvme"}.get(layout.offload),
            },
        )


def test_accelerate_launches_the_configuration(tmp_path):
    for (_, name), values in parsed("accelerate_config", ["accelerate-fsdp"], tmp_path).items():
        _, layout, _ = EXAMPLES[name]
        expected = {"world": layout.world_size, "zero": layout.zero, "script": "run_clm.py"}
        if layout.zero:
            expected |= degrees(layout, "dp_replicate", "dp_shard", "tp", "cp")
            expected |= {
                "version": 2,
                "total": layout.world_size,
                "recompute": layout.recompute == "full",
                "offload": layout.offload == "states",
                "offload_activations": layout.offload == "activations",
                "wrap": "transformer_auto_wrap_policy",
            }
        agree(values, expected)


def test_transformers_reads_the_script_s_arguments(tmp_path):
    for (trainer, name), values in parsed("training_arguments", ["deepspeed", "accelerate-fsdp"], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        itself = layout.recompute == "full" and not (trainer == "accelerate-fsdp" and layout.zero)
        agree(
            values,
            {
                "microbatch": layout.microbatch,
                "microbatches": work.batch.microbatches(layout),
                "recompute": itself,
                "optimizer": OPTIMIZERS[work.optim.kind],
                "betas": list(work.optim.betas),
                "steps": STEPS,
            },
        )
        # The rates agree except for the first step of the warm-up and of the decay.
        planned = [work.optim.lr_at(step, STEPS) for step in range(STEPS)]
        assert values["top_rate"] == pytest.approx(max(planned), rel=0.02)
        assert values["last_rate"] == pytest.approx(planned[-1], abs=0.03 * work.optim.lr)


def test_torchtitan_builds_the_planned_model_and_mesh(tmp_path):
    reshard = {0: "default", 2: "never", 3: "always"}
    for (_, name), values in parsed("torchtitan_config", ["torchtitan"], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        stages = (
            [last - first for first, last in stage_bounds(layout, work.model.num_hidden_layers)]
            if layout.pp > 1
            else None
        )
        agree(
            values,
            {
                **degrees(layout, "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "microbatch"),
                "world": layout.world_size,
                "reshard": reshard[layout.zero],
                "stages": stages,
                "microbatches": work.batch.microbatches(layout),
                "sequences": work.batch.sequences,
                "seq_len": work.batch.seq_len,
                "params": num_params(work.model),
                "recompute": {"none": "NoneType", "selective": "SelectiveAC", "full": "FullAC"}[layout.recompute],
                "accumulation": 1 if layout.pp > 1 else work.batch.microbatches(layout),
            },
        )


def test_nanotron_reads_the_release_s_file(tmp_path):
    exports = parsed("nanotron_config", ["nanotron"], tmp_path, lambda files: "nanotron-0.4.yaml" in files)
    assert len(exports) >= 3
    for (_, name), values in exports.items():
        work, layout, _ = EXAMPLES[name]
        engine = "AllForwardAllBackward" if layout.schedule == "gpipe" else "OneForwardOneBackward"
        agree(
            values,
            {
                **degrees(layout, "dp", "pp", "tp", "zero", "microbatch"),
                "sequences": work.batch.sequences,
                "microbatches": work.batch.microbatches(layout),
                "seq_len": work.batch.seq_len,
                "layers": work.model.num_hidden_layers,
                "engine": f"{engine}PipelineEngine",
                "model": "LlamaConfig",
                "mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
            },
        )
