"""The figures of packing on the page, and the cases of the script."""

from __future__ import annotations

import json
from pathlib import Path

import packing

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "benchmarks" / "results" / "packing.json").read_text())["rows"]


def test_a_case_is_packed_and_measured():
    for case in packing.CASES:
        row = packing.kumi_case(case, 2000)
        assert row["units"] == 2000
        assert 0.9 < row["fill"] <= 1
        assert packing.table([{"program": "kumi", "case": case, **row}]).endswith("kumi")


def test_the_page_has_the_figures_that_were_measured():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    short = [row for row in ROWS if row["program"] == "kumi" and row["mean_share_of_row"] < 1 / 8]
    largest = [row for row in short if row["units"] == 10_000_000]
    assert f"at least {100 * min(row['fill'] for row in short):.2f} % filled" in page
    assert f"in {max(row['cpu_seconds'] for row in largest):.0f} CPU seconds" in page
    assert f"{max(row['peak_mib'] for row in largest)} MiB at most" in page
