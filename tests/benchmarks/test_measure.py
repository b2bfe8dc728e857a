"""The harness that watches a command from outside."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import measure
import pytest

# Two processes that hold memory and burn CPU time while the parent writes a line a step.
SCRIPT = """
    import json, os, sys, time
    held = bytearray(40 << 20)
    child = os.fork()
    began = time.process_time()
    out = None if child == 0 else open(sys.argv[1], "w")
    for step in range(1, 6):
        while time.process_time() < began + 0.1 * step:
            pass
        if out:
            out.write(json.dumps({"step": step, "train/loss": 5.0 / step}) + "\\n")
            out.write(json.dumps({"step": step, "eval/loss": 1.0}) + "\\n")
            out.flush()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
"""


def run(tmp_path: Path, script: str, **options: float) -> measure.Measured:
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(script), str(metrics)]
    return measure.run(command, metrics=metrics, env=os.environ, log=tmp_path / "log.txt", **options)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the harness reads Linux's /proc")
def test_the_whole_process_tree_is_counted(tmp_path):
    measured = run(tmp_path, SCRIPT)
    assert measured.returncode == 0
    assert [mark.step for mark in measured.marks] == [1, 2, 3, 4, 5]
    assert measured.losses() == [5.0 / step for step in range(1, 6)]
    assert measured.cpu >= 0.99  # twice half a second
    assert measured.peak_rss >= 80 << 20
    assert 40 << 20 <= measured.largest_rss < measured.peak_rss
    assert 0 < measured.peak_pss <= measured.peak_rss
    assert all(before.cpu <= after.cpu for before, after in zip(measured.marks, measured.marks[1:]))
    # A step took both processes 0.1 s of CPU time; the kernel counts in hundredths, and looks come every 20 ms.
    assert measured.steady(1).steps == 4
    assert 0.05 < measured.steady(1).cpu < 0.5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the harness reads Linux's /proc")
def test_a_failure_and_an_endless_command_are_reported(tmp_path):
    failed = run(tmp_path, "import sys; print('what went wrong'); sys.exit(3)")
    assert failed.returncode == 3
    assert "what went wrong" in failed.output
    assert failed.marks == ()
    endless = run(tmp_path, "import os, time\nos.fork()\ntime.sleep(60)", limit=0.5)
    assert endless.returncode == -9
    assert endless.wall < 30


def test_a_line_cut_short_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = measure._Lines(path)
    assert lines.new() == []
    path.write_text('{"step": 1, "lo')
    assert lines.new() == []
    path.write_text('{"step": 1, "loss": 2.0}\n{"st')
    assert [measure.step_and_loss(line) for line in lines.new()] == [(1, 2.0)]
    assert measure.step_and_loss({"step": 3, "eval/loss": 1.0}) is None


def test_the_steady_state_leaves_out_the_first_steps():
    marks = [measure.Mark(step, 1.0, wall, wall * 2) for step, wall in enumerate([10.0, 12.0, 13.0, 14.0, 16.0], 1)]
    measured = measure.Measured(tuple(marks), 16.0, 32.0, 0, 0, 0, 0, "")
    assert measured.steady(3) == measure.Steady(median_wall=1.5, wall=1.5, cpu=3.0, steps=2)
    assert measured.steady(1).steps == 4
    with pytest.raises(ValueError, match="5 steps were seen; with 4 dropped at least 6"):
        measured.steady(4)
