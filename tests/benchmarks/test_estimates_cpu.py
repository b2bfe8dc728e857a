"""The comparison of estimates with runs on a CPU, on invented figures."""

from __future__ import annotations

import estimates_cpu

from kumi.config import load, plan_input
from kumi.plan.search.select import select_layout


def compared(estimated, measured, seconds, cpu):
    return estimates_cpu.Compared("cp 2", "cp=2", estimated, measured, seconds, 2 * cpu, cpu, 0.4)


def test_figures_are_compared_with_the_bars():
    rows = [compared(110, 100, 1.0, 1.1), compared(80, 100, 1.0, 1.1), compared(100, 100, 1.3, 1.0)]
    assert [round(row.memory_error, 2) for row in rows] == [0.1, -0.2, 0.0]
    assert "memory within 15%: 2 of 3" in estimates_cpu.summary(rows)[0]
    assert "within 20%: 2 of 3" in estimates_cpu.summary(rows)[0]
    mib = estimates_cpu.MIB
    text = estimates_cpu.line(compared(110 * mib, 100 * mib, 1.0, 1.25))
    assert "memory    110 /    100 MiB ( +10%)" in text
    assert "1.00 /    1.25 CPU s ( -20%)" in text


def test_every_row_is_a_layout_that_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("KUMI_NUMERICS", "reference")
    file = estimates_cpu.ROOT / "examples" / "quickstart.toml"
    for name, row in estimates_cpu.ROWS.items():
        longer = [f"train.out={tmp_path}", "model.config.max_position_embeddings=32768"]
        inputs = plan_input(load(file, [*row.overrides(), *longer]))
        layout = select_layout(inputs.job, inputs.pinned).layout
        assert layout.world_size == 2, name
        assert layout.microbatch * layout.dp <= row.sequences
