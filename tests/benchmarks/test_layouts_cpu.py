"""The table of the costs of layouts."""

from __future__ import annotations

import argparse

import layouts_cpu
import pytest

from kumi.spec.layout import Layout


def test_rows_are_compared_with_one_process_by_their_medians():
    args = argparse.Namespace(sequences=2, seq_len=50)
    runs = [
        layouts_cpu.Measured(layouts_cpu.ONE_PROCESS, [1.0, 9.0], [1.0, 9.0]),
        layouts_cpu.Measured("cp 2", [1.0, 2.0], [0.5, 1.0]),
        layouts_cpu.Measured(layouts_cpu.ONE_PROCESS, [1.0], [1.0]),
        layouts_cpu.Measured("cp 2", [1.2], [0.6]),
    ]
    summary = layouts_cpu.summary(runs, args)
    assert summary[layouts_cpu.ONE_PROCESS]["cpu_s_per_token"] == pytest.approx(0.01)
    assert summary["cp 2"]["ratio"] == pytest.approx(1.2)
    assert summary["cp 2"]["bar"] == 1.15
    assert "cp 2                         12.000   1.200     1.15       167" in layouts_cpu.table({"rows": summary})


def test_one_process_is_measured_first_and_the_others_are_two():
    first, *others = layouts_cpu.ROWS.values()
    assert first.layout == Layout()
    assert {row.layout.world_size for row in others if row is not layouts_cpu.ROWS[row.alone]} == {2}
    assert {layouts_cpu.ROWS[row.alone].layout for row in others} == {Layout()}
