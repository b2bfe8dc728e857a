"""The GPU benchmark's script, tried on the CPU with tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gpu_case
import gpu_cases
import pytest
import torch
from gpu_cases import Case

import gpu
from kumi.spec.checks import illegal
from kumi.spec.layout import Layout
from kumi.validation import random_run
from kumi.validation.fitting_case import estimated_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [
        Case("kumi", "tiny", 2, "none", seq_len=32),
        Case("kumi", "tiny", 2, "selective", seq_len=32, documents=4),
        Case("kumi", "tiny", 1, "full", seq_len=32, layers=1),
        Case("kumi", "tiny-experts", 2, seq_len=32),
        Case("kumi", "tiny", 1, seq_len=32, layout={"schedule": "zb-h1"}, microbatches=3),
        Case("amp", "tiny", 2, "full", seq_len=32),
        Case("bf16", "tiny", 1, seq_len=32),
    ],
    ids=lambda case: case.name,
)
def test_every_kind_of_case_trains(case):
    result = gpu_case.run(case, CPU, seconds=0.02)
    assert result["status"] == "ok"
    assert result["tokens_per_s"] > 0
    assert result["last_loss"] < result["first_loss"]
    assert (result["estimated_bytes"] is None) == (case.system != "kumi")


def test_running_out_of_memory_is_a_result(monkeypatch):
    def no_room(case, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(gpu_case, "kumi_step", no_room)
    result = gpu_case.run(Case("kumi", "tiny", 1), CPU)
    assert result["status"] == "out of memory"
    assert result["reason"] == "CUDA out of memory. Tried to allocate 20.00 GiB."


@pytest.mark.parametrize("card", [16, 80])
def test_cases_are_cut_to_the_card(card):
    """Those of one device: the first of a pair and the second have equal sizes, and every one fits."""
    room = 0.8 * card * 2**30
    alone = [case for case in gpu_cases.all_cases() if case.ranks == 1]
    sized = [gpu_case.fit(case, room) for case in alone[:: 4 if card == 80 else 3]]
    assert all(estimated_bytes(gpu_case.step_case(case)) <= room for case in sized)
    kumi, bare = (gpu_case.fit(case, room) for case in alone[4:6])
    assert replace(kumi, system="amp") == bare
    assert kumi.shape == "8b"


def test_a_late_script_leaves_its_output():
    done = gpu.python("timeit", "-s", "import time; print('early', flush=True)", "time.sleep(60)", limit=4.0)
    assert done.returncode == gpu.LATE
    assert "early" in done.stdout


def test_cases_are_run_in_order_until_the_time_is_spent():
    cases, entries, clock = gpu_cases.all_cases(), [], [100.0]

    def run_one(case: Case, limit: float) -> dict:
        clock[0] -= 30.0
        return {"status": "ok"}

    gpu.run_cases(cases, run_one, skipped={"amp": "no transformers"}, left=lambda: clock[0], save=entries.append)
    statuses = [entry["status"] for entry in entries]
    assert len(entries) == len(cases)
    assert statuses[:6] == ["ok", "skipped", "ok", "skipped", "ok", "skipped"]
    assert set(statuses[6:]) == {"left out", "skipped"}


def test_the_first_cases_are_the_headline():
    cases = gpu_cases.all_cases()
    assert cases[0] == Case("kumi", "1b", 4)
    assert cases[1] == Case("amp", "1b", 4)
    expected = {(shape, recompute) for shape in ("1b", "8b") for recompute in ("none", "selective", "full")}
    assert expected <= {(case.shape, case.recompute) for case in cases}
    assert {True, False} == {case.compile for case in cases}
    assert "8b/24 layers" in cases[4].name


@pytest.mark.parametrize(
    "case",
    [
        Case("kumi", "tiny", 1, seq_len=32, layout={"pp": 2}, microbatches=2),
        pytest.param(
            Case("kumi", "tiny-experts", 1, seq_len=32, layout={"dp_shard": 2, "ep": 2, "zero": 1}),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda case: case.name,
)
def test_several_ranks_train_together(case):
    result = gpu.run_case(case, "cpu", 100.0, devices=2)
    assert result["status"] == "ok", result
    assert result["last_loss"] != result["first_loss"]
    assert result["tokens"] == 64
    assert gpu.run_case(case, "cpu", 100.0, devices=1)["reason"] == "takes 2 devices, and there are 1"


def test_a_rank_that_fails_ends_the_others():
    case = Case("kumi", "tiny", 1, seq_len=32, layout={"tp": 2}, async_tp=True)
    result = gpu.run_case(case, "cpu", 100.0, devices=2)
    assert result["status"] == "failed"
    assert "comm.async_tp=true on cpu with tp=2" in result["reason"]


def test_layouts_are_legal():
    for case in gpu_cases.on_several():
        run = random_run.make_run(
            case.config(),
            seq_len=case.seq_len,
            microbatch=case.microbatch,
            recompute=case.recompute,
            compile=case.compile,
            precision="bf16",
            layout=Layout(**case.layout),
            microbatches=case.microbatches,
        )
        assert illegal(run.model, run.layout, run.job.cluster, run.job.batch) == [], case.name


def test_the_script_writes_its_results(tmp_path):
    out = tmp_path / "gpu.json"
    script = Path(gpu.__file__)
    command = [
        sys.executable,
        str(script),
        "--device",
        "cpu",
        "--tiny",
        "--no-tests",
        "--out",
        str(out),
        "--budget",
        "60",
    ]
    done = subprocess.run([*command, "--only", "kumi, tiny, mb 1, recompute none"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert [entry["status"] for entry in results["cases"]] == ["ok"]
    assert results["tests"]["status"] == "not run"
    assert results["machine"]["packages"]["torch"]
    assert "tok/s" in done.stdout


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == "tomli_w" else object())
    with pytest.raises(SystemExit, match="pip install tomli-w"):
        gpu.check_packages()
