"""The table of the losses that optimizers reach."""

from __future__ import annotations

import json
from pathlib import Path

import optimizers

ROOT = Path(__file__).parents[2]


def test_each_optimizer_is_compared_at_its_best_rate():
    rows = {
        f"{kind} {lr}": {"kind": kind, "lr": lr, "eval/loss": found}
        for kind, lr, found in [
            ("adamw", 1e-3, [5.0, 4.0]),
            ("adamw", 2e-3, [5.0, 4.5]),
            ("muon", 1e-3, [4.9, 4.1]),
            ("muon", 4e-3, [4.0, 3.6]),
        ]
    }
    assert optimizers.table(rows).splitlines()[1:] == [
        "adamw            0.001   4.0000    1.0000      step 50",
        "muon             0.004   3.6000    0.9000      step 25",
    ]


def test_the_page_has_the_losses_that_were_measured():
    page = (ROOT / "docs" / "optimizers.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "optimizers_quickstart.json").read_text())["rows"].values()
    for kind in ("adamw", "adamw-8bit", "muon"):
        losses = [row["eval/loss"][-1] for row in rows if row["kind"] == kind]
        cells = [f"**{loss:.3f}**" if loss == min(losses) else f"{loss:.3f}" for loss in losses]
        assert f"| `{kind}` | {' | '.join(cells)} |" in page
