"""The figures of the page on conversion are those that were measured and committed."""

import json
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_committed_figures():
    committed = json.loads((ROOT / "benchmarks" / "results" / "convert.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
    copy = median(row["seconds"] for row in committed["rows"]["copy"])
    for name, rows in committed["rows"].items():
        seconds, memory = median(row["seconds"] for row in rows), max(row["memory"] for row in rows)
        assert f"| {name} | {seconds:.2f} | {copy / seconds:.2f} | {memory / 1e6:.0f} |" in page
    assert f"{committed['bytes'] / 1e9:.2f} GB" in page
    assert f"{committed['largest_tensor'] / 1e6:.0f} MB" in page
