"""The CPU benchmark: its run file, its bare loop beside kumi, its tables."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import matmul_peak
import measure
import numpy as np
import pytest
import report_cpu
import shapes
import torch
import train_cpu
import workload

from kumi.config import from_dict
from kumi.spec import families, ledger
from kumi.train.step import StepBatch, train_step
from kumi.train.train_state import TrainState
from kumi.validation.random_run import make_rank_state, synthetic


def test_the_run_file_is_a_valid_run_and_the_shapes_are_what_they_are_called():
    text = workload.run_file(Path("w"), ranks=2, steps=7, precision="bf16", out=Path("o"))
    config = from_dict(tomllib.loads(text))
    assert config.batch.tokens_per_step == 2 * 8 * 512
    assert config.data.cross_document
    counts = {
        name: ledger.num_params(families.from_hf(config))
        for name, config in (("w1", shapes.W1), ("1b", shapes.LLAMA_1B), ("8b", shapes.LLAMA_8B))
    }
    assert counts == {"w1": 18_880_896, "1b": 1_235_814_400, "8b": 8_030_261_248}


def bare_arguments(model: Path, batches: Path, metrics: Path) -> argparse.Namespace:
    return argparse.Namespace(
        model=model,
        batches=batches,
        metrics=metrics,
        dtype="fp32",
        device="cpu",
        random=False,
        recompute=False,
        compile=False,
        packed=False,
        steps=3,
        microbatch=2,
        seq_len=32,
        lr=3e-4,
    )


def test_the_bare_loop_trains_as_kumi_does(tmp_path):
    """Same weights, same tokens, same optimizer: the losses of three steps agree."""
    import bare_loop  # takes seconds
    from transformers import LlamaConfig, LlamaForCausalLM

    # kumi does not decay norm weights as the bare loop does: a difference of 0.1 * lr a step, below the tolerance.
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shapes.TINY)).save_pretrained(tmp_path / "model")
    batch = synthetic(6, 32, 256, documents=1)
    arrays = {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": batch["position_ids"]}
    np.savez(tmp_path / "batches.npz", **arrays)
    args = bare_arguments(tmp_path / "model", tmp_path / "batches.npz", tmp_path / "metrics.jsonl")
    model = bare_loop.load_model(args)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    bare_loop.train(args, model, rank=0, world=1)
    lines = [json.loads(line) for line in args.metrics.read_text().splitlines()]

    parts = make_rank_state(
        shapes.TINY, torch.device("cpu"), seq_len=32, microbatch=2, recompute="none", compile=False, precision="fp32"
    )
    parts.model.load_state_dict(start)
    state, losses = TrainState(), []
    for step in range(3):
        two = slice(2 * step, 2 * step + 2)
        rows = {name: column[two] for name, column in batch.items()}
        losses.append(train_step(parts, state, StepBatch(rows, 64, 64, None, 0.0), None).loss.item())
    assert [line["step"] for line in lines] == [1, 2, 3]
    np.testing.assert_allclose(losses, [line["loss"] for line in lines], rtol=1e-5)


def test_each_rank_of_the_bare_loop_reads_its_own_rows(tmp_path):
    import bare_loop

    ids = np.arange(24)[:, None].repeat(4, axis=1)
    np.savez(tmp_path / "b.npz", input_ids=ids, labels=ids, position_ids=ids)
    args = bare_arguments(tmp_path, tmp_path / "b.npz", tmp_path / "m")
    read = [[bare_loop.Batches(args, 256, rank, 2)(step)[0][:, 0].tolist() for rank in range(2)] for step in range(2)]
    assert read == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_row_whose_package_is_missing_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(train_cpu, "find_spec", lambda name: None if name == "accelerate" else object())
    assert train_cpu.reason_missing("bare fp32") is None
    assert train_cpu.reason_missing("trainer fp32") == "the package accelerate is not installed: pip install accelerate"


@pytest.mark.parametrize(
    ("row", "processes", "words"),
    [
        ("kumi bf16", 2, ["-m kumi train"]),
        ("bare amp", 1, ["bare_loop.py", "--dtype", "amp"]),
        ("bare amp", 2, ["torch.distributed.run", "--nproc_per_node", "2", "bare_loop.py"]),
        ("trainer fp32", 1, ["hf_trainer.py"]),
    ],
)
def test_every_row_is_a_command(tmp_path, row, processes, words):
    setup = next(setup for setup in train_cpu.SETUPS if setup.processes == processes)
    line, metrics = train_cpu.command(row, setup, tmp_path, tmp_path, "w1")
    joined = " ".join(line)
    assert all(word in joined for word in words)
    assert metrics.name == "metrics.jsonl"


@pytest.mark.exhaustive
def test_the_benchmarks_run(tmp_path):
    """With a tiny model, whose figures mean nothing."""
    script = str(Path(train_cpu.__file__))
    rows = ["bare fp32", "kumi fp32", "bare amp", "kumi bf16", "bare fp32 packed", "kumi fp32 packed"]
    line = [
        sys.executable,
        script,
        "--tiny",
        "--steps",
        "5",
        "--repeats",
        "1",
        "--budget",
        "3600",
        "--work",
        str(tmp_path / "work"),
        "--json",
        str(tmp_path / "cpu.json"),
        "--only",
        *rows,
    ]
    environ = {key: value for key, value in os.environ.items() if key != "KUMI_NUMERICS"}
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    process = subprocess.run(line, capture_output=True, text=True, env=environ)
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert {(run["row"], run["setup"]) for run in results["runs"]} == set(
        itertools.product(rows, (setup.name for setup in train_cpu.SETUPS))
    )
    assert results["left_out"] == []
    for setup in train_cpu.SETUPS:
        curves = {
            run["row"]: [mark["loss"] for mark in run["marks"]] for run in results["runs"] if run["setup"] == setup.name
        }
        for row in ("fp32", "fp32 packed"):
            assert curves[f"kumi {row}"] == pytest.approx(curves[f"bare {row}"], rel=1e-4)
    assert "packed documents / whole rows" in process.stdout or "kumi bf16, the default" in process.stdout
    line = [sys.executable, str(Path(script).with_name("numerics_cpu.py")), "--only", "tiny", "--repeats", "1"]
    process = subprocess.run(line, capture_output=True, text=True, env=environ)
    assert process.returncode == 0, process.stderr
    assert "tiny: seconds of a step" in process.stdout


def test_rows_follow_one_another_in_turn():
    setups = list(train_cpu.SETUPS)
    runs = train_cpu.order(["bare fp32", "kumi fp32", "trainer fp32"], setups, repeats=2)
    assert [row for row, setup, _ in runs if setup is setups[0]] == [
        "bare fp32",
        "kumi fp32",
        "bare fp32",
        "kumi fp32",
        "trainer fp32",
    ]


def measured(step_s: float, losses: list[float]) -> dict:
    marks = [{"step": n, "loss": loss, "wall": step_s * n, "cpu": 2 * step_s * n} for n, loss in enumerate(losses, 1)]
    return {
        "marks": marks,
        "wall": 1.0,
        "cpu": 1.0,
        "peak_rss": 2**31,
        "peak_pss": 2**30,
        "largest_rss": 2**30,
        "returncode": 0,
        "output": "",
    }


def test_the_report_shows_ratios_shares_and_loss_differences():
    chosen = {"numerics": "kind=bf16 products=default flash=none", "kind": "bf16", "seconds": 0.5}
    setup = {"name": "one", "processes": 1, "threads": 2, "steps": 5, "tokens": 4096, "chosen": chosen}
    losses = [9.0, 8.0, 7.0, 6.0, 5.0]
    rows = {
        "bare fp32": (4.0, losses),
        "kumi fp32": (2.0, losses),
        "kumi bf16": (1.0, [*losses[:4], 5.05]),
        "bare amp": (3.0, losses),
        "kumi bf16 packed": (1.25, losses),
    }
    runs = [{"row": row, "setup": "one", **measured(*values)} for row, values in rows.items()]
    kinds = {kind: {"peak": 400.0, "peak_per_cpu_second": 250.0, "error": 1e-7} for kind in matmul_peak.KINDS}
    result = {
        "machine": {
            "cpu": "c",
            "cores": 2,
            "cpu_flags": [],
            "memory_bytes": 2**34,
            "python": "3",
            "packages": {},
            "commit": None,
        },
        "peaks": [{"threads": 2, "kinds": kinds}],
        "setups": [setup],
        "runs": runs,
        "skipped": {"trainer fp32": "no accelerate"},
        "left_out": ["x"],
        "drop": 3,
    }
    text = report_cpu.report(result)
    assert "kumi fp32 / bare fp32: 2.00 by CPU seconds, 2.00 by wall clock" in text
    assert "kumi bf16 / bare fp32: 4.00 by CPU seconds" in text
    assert "loss of kumi bf16 against kumi fp32 over 5 steps: at most 1.000 % apart" in text
    # 464 GFLOP in 2 CPU seconds, of 250 GFLOP a CPU second.
    share = 100 * report_cpu.train_flops(shapes.W1, 4096) / 2.0 / 250e9
    assert f"{share:.0f} % bf16" in text
    assert "skipped trainer fp32: no accelerate" in text
    assert "kumi bf16: 2.00 CPU seconds to the first step; the least of the others is 6.00 (bare amp)" in text
    assert "kumi chose kind=bf16 products=default flash=none, in 0.50 s" in text
    assert "kumi bf16, the default / the faster bare loop: 3.00 (bare amp) by CPU seconds, 3.00 (bare amp)" in text
    assert "packed documents / whole rows: 1.25 of the CPU seconds, 1.25 of the time" in text


def test_a_spread_is_the_median_and_the_range():
    assert report_cpu.spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0-3.0)"
    assert report_cpu.spread([2.0], ".1f") == "2.0"


def test_matmul_rates_are_positive_and_float32_is_exact():
    rate = matmul_peak.rate((64, 64, 64), torch.float32, 0.01)
    assert 0 < rate["gflops"] <= rate["best"]
    assert matmul_peak.relative_error(torch.float32) < 1e-6 < matmul_peak.relative_error(torch.bfloat16)


def test_measured_runs_survive_json():
    run = measured(1.0, [2.0, 1.0])
    setup = {"name": "one"}
    restored = report_cpu.runs_of({"runs": [{"row": "r", "setup": "one", **json.loads(json.dumps(run))}]}, setup)
    assert isinstance(restored["r"][0], measure.Measured)
    assert restored["r"][0].losses() == [2.0, 1.0]
