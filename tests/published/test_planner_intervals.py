"""The stored errors of published runs, and the figures that docs/accuracy.md takes from them."""

from __future__ import annotations

import json
from pathlib import Path

import planner_intervals
import pytest

from kumi.plan.uncertainty.error_table import csv_row, published_runs

ROOT = Path(__file__).parents[2]
TABLES = [ROOT / "tests" / "published" / f"{name}.csv" for name in ("runs", "torchtitan", "megatron")]


@pytest.mark.exhaustive
def test_the_stored_errors_are_those_of_the_planner():
    """After a change of estimates: python benchmarks/planner_intervals.py ... --write, as docs/accuracy.md says."""
    runs, _, _ = planner_intervals.published(TABLES, ROOT / "tests" / "published" / "failures.csv")
    assert [csv_row(run) for run in planner_intervals.stored(runs)] == [csv_row(run) for run in published_runs()]


def test_the_page_has_the_measured_coverage():
    page = (ROOT / "docs" / "accuracy.md").read_text()
    results = json.loads((ROOT / "benchmarks" / "results" / "planner_intervals.json").read_text())
    for level in ("80", "90"):
        for quantity in ("step time", "memory"):
            scores = results[f"{quantity} {level}%"]
            inside, width = f"{100 * scores['coverage']:.1f} %", f"{scores['width']:.2f}"
            assert f"| {quantity} | {level} % | {inside} | {len(scores['experiments'])} | {width} |" in page
    fits = results["fits"]
    assert f"{100 * fits['oom_recall']:.1f} % of {fits['oom']} layouts that ran out of memory" in page
    assert f"is {fits['brier']:.3f};" in page
