"""Estimates of generation stay as close to published throughputs as the page on accuracy says."""

import json
from math import exp, log
from pathlib import Path
from statistics import mean

import decode_published
import pytest
from decode_published import ROWS, predicted_rate, typical_error

from kumi.plan.inference import decode_step

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "benchmarks" / "results" / "decode_published.json").read_text(encoding="utf-8"))


def test_the_committed_ratios_are_those_of_today():
    """A row of each table and kind of model; the others are functions of the same constants."""
    rows = {(row["source"], row["model"]): index for index, row in enumerate(COMMITTED["rows"])}
    assert len(rows) == 7
    for index in rows.values():
        ratio = predicted_rate(ROWS[index]) / ROWS[index].rate
        assert ratio == pytest.approx(COMMITTED["rows"][index]["ratio"], abs=0.002)


def test_the_page_has_the_committed_errors():
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    section = page.partition("## Generation")[2].partition("## ")[0]
    for name, errors in COMMITTED["errors"].items():
        own = [row for row in COMMITTED["rows"] if row["source"] == name]
        assert errors["all"] == pytest.approx(typical_error([row["ratio"] for row in own]))
        (line,) = [line for line in section.splitlines() if line.startswith(f"| {name}")]
        assert f"| {len(own)} |" in line
        assert f"{100 * errors['all']:.1f} %" in line
        assert f"{100 * errors['grouped']:.1f} %" in line
        assert errors["grouped"] < 0.1


def test_the_share_of_the_bandwidth_is_fitted_to_gpt_fast(monkeypatch):
    rows = [row for row in ROWS if row.source == "gpt-fast"]

    def error(share):
        monkeypatch.setattr(decode_step, "READ_SHARE", share)
        return mean(abs(log(predicted_rate(row) / row.rate)) for row in rows)

    fitted = decode_step.READ_SHARE
    assert exp(error(fitted)) <= 1.005 * min(exp(error(fitted + change)) for change in (-0.04, 0.04))


def test_rows_are_as_published():
    assert len(decode_published.ROWS) == 55
