"""The progress of a long job: on a terminal, elsewhere, and without a display."""

import io
import sys
import threading

import pytest

from kumi import progress
from kumi.progress import show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_a_bar_shows_only_where_a_job_takes_its_time(patience, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "PATIENCE", patience)
    with show_progress("searching", 1.0, "{:.0%}".format) as update:
        update(0.5, "a note")
        timer = next((one for one in threading.enumerate() if isinstance(one, threading.Timer)), None)
        if timer and not patience:
            timer.join()
    shown = sys.stderr.getvalue()
    assert all((words in shown) == (patience == 0) for words in ("searching", "50% of 100% | a note"))


def test_elsewhere_there_is_a_line_now_and_then(monkeypatch, capsys):
    now, told = [0.0], [(1.0, 512, ""), (3.0, 1024, ""), (12.0, 2048, ""), (13.0, 3072, "fast"), (30.0, 4096, "")]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with show_progress("writing model", 4096) as update:
        for now[0], done, note in told:
            update(done, note)
    assert capsys.readouterr().err.splitlines() == [
        "writing model | 1 KiB of 4 KiB | eta 9s",
        "writing model | 3 KiB of 4 KiB | fast | eta 4s",
    ]


def test_nothing_shows_where_nobody_asked(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with show_progress("measuring", 3, str, enabled=False) as update:
        update(1, "a kernel")
    assert capsys.readouterr().err == ""
