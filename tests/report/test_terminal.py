import io
from dataclasses import replace

import pytest
from examples import CHOSEN, best, estimate, job, memory, one_device, report
from rich.console import Console

from kumi.plan.report import Report
from kumi.report.terminal import render_report
from kumi.spec.layout import Layout


def shown(made, width=80, **options):
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, **options).print(render_report(made))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_cut(width):
    text = shown(report(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_every_section_is_there():
    text = " ".join(shown(report()).split())
    for words in (
        "TP 8 x PP 4 (1f1b) x ZeRO-1 over 2",
        "Memory of pp rank 0 (the fullest)",
        "activations 24 GiB 33%",
        "pipeline bubble 1.50 s 15%",
        "tp over NVLink 5,120 573 GB 2.00 s 1.00 s 287 GB/s 450 GB/s",
        "within noise",
        "3.00 s less exposed dp",
        "Refused: tp=16",
        "Rules of thumb that mislead here",
        "[layout] pp = 4",
    ):
        assert words in text


def test_a_plain_pipe_without_blocks_gets_letters_and_hashes():
    class Ascii(io.StringIO):
        encoding = "ascii"

    file = Ascii()
    Console(file=file, width=80, highlight=False).print(render_report(report()))
    file.getvalue().encode("ascii")
    assert "####" in file.getvalue()


def test_stage_bars_have_a_letter_for_each_kind_as_long_as_its_share():
    line = next(line for line in shown(report(), 100).splitlines() if line.startswith("  rank 3"))
    bar = line.split("GiB")[1].strip()
    width = len(bar)
    shares = {"P": 4, "G": 8, "O": 12, "w": 2, "A": 9, "L": 3, "b": 1, "c": 4}
    for letter, gib in shares.items():
        assert abs(bar.count(letter) - width * gib / 72) <= 1
    assert bar.rstrip(".")[-1] == "c"


def test_many_ranks_are_picked_from_and_that_is_said():
    stages = tuple(memory(params=rank + 1) for rank in range(64))
    made = Report(job(), estimate(replace(CHOSEN, pp=64), dict(best().time), stages))
    text = shown(made)
    assert "7 of 64 ranks; all are in --json" in text
    assert "rank 0 " in text
    assert "rank 63 " in text


def test_one_device_needs_no_traffic_and_no_ranks():
    alone = estimate(Layout(), {"forward": 1.0, "backward": 2.0}, (memory(params=10),))
    text = shown(Report(one_device(), alone))
    assert "Communication" not in text
    assert "rank" not in text.replace("ranks", "")
    assert "one device" in text
