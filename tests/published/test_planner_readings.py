"""How the memory and the FLOPs of tables were counted: rules on made-up rows, and evidence from the published ones."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from planner_defaults import reading_of
from planner_flops import counted_flops
from planner_jobs import Case, case_of
from planner_readings import Reading
from planner_rows import read, run_of
from planner_scores import Scored, predicted_memory

from kumi.plan.memory.device_memory import memory_reading

HERE = Path(__file__).parent
GIB = 2**30
PLAIN = {
    "id": "new-1",
    "source": "a blog",
    "model_name": "something",
    "layers": "16",
    "hidden": "2048",
    "heads": "16",
    "vocab": "128000",
    "seq_len": "2048",
    "gpu": "H100-80GB",
    "gpus": "8",
    "tp": "1",
    "pp": "4",
    "micro_batch": "2",
    "global_batch": "64",
    "precision": "bf16",
    "step_time_s": "1.5",
    "peak_mem_gb": "60.2",
}


def run(**cells):
    return run_of(PLAIN | cells)


@pytest.mark.parametrize(
    ("notes", "tool"),
    [
        ("", ""),
        ("recompute not stated; peak memory is reserved", "reserved"),
        ("memory metric (allocated or reserved) not stated", ""),
        ("max memory allocated 51.0, reserved 60.2", "reserved"),
        ("max memory allocated: 60.2 GiB (reserved: 66.0 GiB)", "allocated"),
        ("51.0 GiB allocated, 60.2 GiB reserved", "reserved"),
        ("peak memory reserved and allocated, GB", "allocated"),
        ("Mem = nvidia-smi; batch size not stated", "nvidia-smi"),
        ("nodes reserved for a week", ""),
    ],
)
def test_the_tool_is_that_of_a_clause_about_memory(notes, tool):
    assert reading_of(run(notes=notes)) == Reading(tool)


def test_a_trainer_s_habit_counts_where_the_notes_say_nothing():
    assert reading_of(run(source="torchtitan's README")) == Reading("reserved")
    assert reading_of(run(source="nanotron")) == Reading("reserved", 0)
    assert reading_of(run(source="nanotron", notes="peak memory allocated")) == Reading("allocated", 0)


def test_memory_in_use_is_compared_with_memory_in_use_and_a_rank_with_its_own():
    def predicted(**cells):
        case = case_of(run(**cells))
        return float(predicted_memory(Scored((case,), np.ones(1), np.full(1, 70 * GIB), np.ones((2, 1))))[0]), case

    (in_use, case), (reserved, _) = predicted(notes="peak memory allocated"), predicted(notes="peak memory reserved")
    assert in_use == memory_reading(case.job, case.layout, "allocated") < reserved < 70 * GIB
    # The last of two stages has the logits; nanotron reads the first.
    cells = {"pp": "2", "layers": "8", "vocab": "256000", "micro_batch": "4", "global_batch": "16"}
    first_rank, case = predicted(source="nanotron", notes="peak memory allocated", **cells)
    assert first_rank == memory_reading(case.job, case.layout, "allocated", 0)
    assert first_rank < memory_reading(case.job, case.layout, "allocated")


def playbook():
    """(run, gradient accumulation) of the playbook's grid."""
    runs = [one for one in read(HERE / "runs.csv") if one.source == "nano"]
    return [(one, int(re.search(r"grad_acc=(\d+)", one.text).group(1))) for one in runs]


def test_the_playbook_s_memory_is_not_memory_in_use():
    """Memory in use depends on the program alone, and grows with the microbatch; its figures do neither."""
    same: dict[tuple, list[float]] = defaultdict(list)
    by_size: dict[tuple, dict[int, float]] = defaultdict(dict)
    for row, accumulated in playbook():
        if row.pp == 1 and "0" in row.sharding and accumulated >= 4:
            same[row.model, row.tp, row.micro_batch].append(row.memory)
        if accumulated >= max(4, row.pp):
            by_size[row.model, row.tp, row.pp, row.dp, row.sharding][row.micro_batch] = row.memory
    spread = [max(sizes) / min(sizes) - 1 for sizes in same.values() if len(sizes) > 1]
    assert (len(spread), sum(ratio > 0.01 for ratio in spread), sum(ratio > 0.1 for ratio in spread)) == (39, 31, 13)
    falls = [
        sizes[more] < sizes[less] for sizes in by_size.values() for less, more in zip(sorted(sizes), sorted(sizes)[1:])
    ]
    assert sum(falls) == 8


def test_tflops_of_bridge_count_half_of_attention_and_those_of_megatron_all_of_it():
    cells = {"step_time_s": "", "tflops_per_gpu": "400", "seq_len": "32768", "pp": "1"}
    of_all, of_half = (
        case_of(run(**cells, source=name)) for name in ("Megatron-LM README", "NVIDIA Megatron-Bridge docs")
    )
    assert of_half.seconds < 0.8 * of_all.seconds


def test_tables_that_print_tokens_and_tflops_count_flops_as_is_taken_here():
    ratios: dict[str, list[float]] = defaultdict(list)
    for name in ("runs", "megatron"):
        for row in read(HERE / f"{name}.csv"):
            case = case_of(row) if row.flops_per_gpu and (row.seconds or row.tokens_per_s_per_gpu) else ""
            # NVIDIA counts DeepSeek's extra layer for several tokens at once, and GPT-OSS's windows.
            if isinstance(case, Case) and not re.search(r"deepseek|gpt oss", row.text):
                counted = counted_flops(row, case.job, case.layout)
                ratios[row.source].append(row.flops_per_gpu * case.layout.world_size * case.seconds / counted)
    assert {"hag", "mpt", "mbridge", "bloom", "mlm-example", "mlm-sep2020", "bridge-skill-ab"} <= set(ratios)
    for source, values in ratios.items():
        assert np.median(values) == pytest.approx(1, abs=0.01), source


@pytest.mark.parametrize(
    ("sharding", "zero", "shards", "replicas"),
    [
        ("HSDP", 3, 8, 4),
        ("HYBRID_SHARD", 3, 8, 4),
        ("HSDP=4", 3, 4, 8),
        ("HSDP 2x16", 3, 16, 2),
        ("HSDP, ZeRO-2", 2, 8, 4),
        ("FSDP", 3, 32, 1),
        ("FSDP=16", 3, 16, 2),
        ("FSDP2 (ZeRO-3)", 3, 32, 1),
        ("FSDP SHARD_GRAD_OP", 2, 32, 1),
        ("FSDP NO_SHARD", 0, 1, 32),
    ],
)
def test_hybrid_sharding_without_a_number_shards_within_a_node(sharding, zero, shards, replicas):
    layout = case_of(run(gpus="32", pp="1", zero_stage_or_fsdp=sharding)).layout
    assert (layout.zero, layout.dp_shard, layout.dp_replicate) == (zero, shards, replicas)


def test_hybrid_sharding_leaves_room_for_tensor_parallel_ranks():
    layout = case_of(run(gpus="32", pp="1", tp="2", zero_stage_or_fsdp="HSDP")).layout
    assert (layout.dp_shard, layout.dp_replicate) == (4, 4)
