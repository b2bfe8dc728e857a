"""The figures of docs/gpu.md are those of the stored measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import shapes

from kumi.config import load_plan
from kumi.config.jobs import job
from kumi.plan.estimate import estimate
from kumi.spec.layout import Layout

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_figures_of_the_page():
    page = (ROOT / "docs" / "gpu.md").read_text()
    cases = json.loads((RESULTS / "gpu_nvidia-h100-80gb-hbm3_2026-11-26_2227.json").read_text())
    peak = cases["machine"]["peak_flops"]
    for case in cases["cases"]:
        mfu = 100 * case["flops_per_s"] / peak
        figures = f"{case['tokens_per_s']:,.0f} | {mfu:.1f} % | {case['peak_bytes'] / 2**30:.1f} GiB"
        assert figures in page, case["name"]
    report = json.loads((RESULTS / "gpu_report_nvidia-h100_2026-11-26.json").read_text())
    rows = {part["name"]: part["rows"] for part in report["parts"]}
    for row in rows["attention"]:
        if row["kind"] in ("kumi", "FlexAttention, compiled", "SDPA, flash") and "ms" in row:
            assert f"| {row['ms']:.2f} | {row['TFLOP/s']:.0f} |" in page, row
    times = {(row["operation"], row["implementation"]): row["ms"] for row in rows["kernels"] if "ms" in row}
    for operation in ("loss", "experts", "scan"):
        triton, torch = times[operation, "triton"], times[operation, "torch"]
        digits = 2 if triton < 1 else 1
        assert f"| {triton:.{digits}f} | {torch:.{digits}f} |" in page, operation


@pytest.mark.parametrize(
    ("shape", "recompute", "compiled", "kernels"),
    [(shapes.LLAMA_8B, "full", True, "loss:triton"), (shapes.LLAMA_1B, "none", False, "torch")],
)
def test_estimates_of_the_page(tmp_path, shape, recompute, compiled, kernels):
    """An estimate with the kernels of the measured step, without a layout search."""
    machine = tmp_path / "machine.toml"
    machine.write_text('device = "h100-sxm"\ndevices_per_node = 1\n')
    run = {
        "model": {"init": "random", "config": shapes.with_layers(shape, 8)},
        "cluster": {"source": str(machine)},
        "batch": {"seq_len": 8192, "tokens_per_step": 8192},
        "precision": {"kind": "bf16", "kernels": kernels},
        "train": {"steps": 1, "out": "run", "compile": compiled},
    }
    predicted = estimate(job(load_plan(run)), Layout(recompute=recompute)).step_seconds
    measured = _compiled_step() if compiled else _profiled_step()
    page = " ".join((ROOT / "docs" / "gpu.md").read_text().split())
    assert f"predicts {predicted:.3f} s" in page
    assert f"took {measured:.3f} s" in page


def _compiled_step():
    cases = json.loads((RESULTS / "gpu_nvidia-h100-80gb-hbm3_2026-11-26_2227.json").read_text())["cases"]
    return next(case["step_s"] for case in cases if case["system"] == "kumi")


def _profiled_step():
    report = json.loads((RESULTS / "gpu_report_nvidia-h100_2026-11-26.json").read_text())
    rows = next(part["rows"] for part in report["parts"] if part["name"] == "profile")
    return next(row["ms"] for row in rows if row["what"].startswith("two steps, 8 layers")) / 2e3
