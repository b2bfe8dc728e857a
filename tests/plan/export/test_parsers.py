"""Every export as the trainer's own code reads it, where that trainer's package is installed.

Each check is a script in `parsers/`, run by a process of its own: these packages patch, warn and set up a great deal.
"""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from export_jobs import EXAMPLES

from kumi.export import export
from kumi.export.hugging_face import OPTIMIZERS
from kumi.spec.ledger import num_params
from kumi.spec.sharding import stage_bounds

PARSERS = Path(__file__).parent / "parsers"
# Where the trainers' packages are looked for.
PYTHON = sys.executable
MISSING = 77
STEPS = 200


def parsed(script, trainers, folder, wanted=lambda files: True):
    """What the trainers read in the exports of all examples they can carry out: (trainer, name) -> facts."""
    names = []
    for trainer, (name, (work, layout, able)) in product(trainers, EXAMPLES.items()):
        files = export(work, layout, trainer, steps=STEPS) if trainer in able else {}
        if files and wanted(files):
            names.append((trainer, name))
            (folder / trainer / name).mkdir(parents=True)
            for file, text in files.items():
                (folder / trainer / name / file).write_text(text)
    assert names
    command = [PYTHON, str(PARSERS / f"{script}.py"), *(str(folder / trainer / name) for trainer, name in names)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if found.returncode == MISSING:
        pytest.skip(found.stdout.strip())
    assert found.returncode == 0, found.stderr[-3000:]
    return dict(zip(names, json.loads(found.stdout.splitlines()[-1]), strict=True))


def degrees(layout, *axes):
    return {axis: getattr(layout, axis) for axis in axes}


def agree(found, expected):
    """Whether `found` has all of `expected`, with the difference in sight where it has not."""
    assert {key: found.get(key) for key in expected} == expected


def megatron(name):
    """What Megatron must have read of example `name`."""
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
    for (_, name), found in parsed("megatron_core", ["megatron-bridge"], tmp_path).items():
        agree(found, megatron(name))


@pytest.mark.parametrize(
    ("script", "trainer"), [("megatron_lm", "megatron-lm"), ("megatron_bridge", "megatron-bridge")]
)
def test_megatron_reads_and_validates_the_run(tmp_path, script, trainer):
    for (_, name), found in parsed(script, [trainer], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        fsdp = {2: "optim_grads", 3: "optim_grads_params"}.get(layout.zero)
        agree(
            found,
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
        if found.get("stages"):
            assert found["stages"] == [
                last - first for first, last in stage_bounds(layout, work.model.num_hidden_layers)
            ]


def test_deepspeed_reads_the_configuration(tmp_path):
    for (_, name), found in parsed("deepspeed_config", ["deepspeed"], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        agree(
            found,
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
    for (_, name), found in parsed("accelerate_config", ["accelerate-fsdp"], tmp_path).items():
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
        agree(found, expected)


def test_transformers_reads_the_script_s_arguments(tmp_path):
    for (trainer, name), found in parsed("training_arguments", ["deepspeed", "accelerate-fsdp"], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        itself = layout.recompute == "full" and not (trainer == "accelerate-fsdp" and layout.zero)
        agree(
            found,
            {
                "microbatch": layout.microbatch,
                "microbatches": work.batch.microbatches(layout),
                "recompute": itself,
                "optimizer": OPTIMIZERS[work.optim.kind],
                "betas": list(work.optim.betas),
                "steps": STEPS,
            },
        )
        # The rates agree but for where the warm-up and the decay count their first step from.
        planned = [work.optim.lr_at(step, STEPS) for step in range(STEPS)]
        assert found["top_rate"] == pytest.approx(max(planned), rel=0.02)
        assert found["last_rate"] == pytest.approx(planned[-1], abs=0.03 * work.optim.lr)


def test_torchtitan_builds_the_planned_model_and_mesh(tmp_path):
    reshard = {0: "default", 2: "never", 3: "always"}
    for (_, name), found in parsed("torchtitan_config", ["torchtitan"], tmp_path).items():
        work, layout, _ = EXAMPLES[name]
        stages = (
            [last - first for first, last in stage_bounds(layout, work.model.num_hidden_layers)]
            if layout.pp > 1
            else None
        )
        agree(
            found,
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
    found = parsed("nanotron_config", ["nanotron"], tmp_path, lambda files: "nanotron-0.4.yaml" in files)
    assert len(found) >= 3
    for (_, name), facts in found.items():
        work, layout, _ = EXAMPLES[name]
        engine = "AllForwardAllBackward" if layout.schedule == "gpipe" else "OneForwardOneBackward"
        agree(
            facts,
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
