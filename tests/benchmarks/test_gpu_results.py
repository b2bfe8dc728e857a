"""The figures of docs/gpu.md are those of the stored measurements."""

from __future__ import annotations

import json
from pathlib import Path

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
