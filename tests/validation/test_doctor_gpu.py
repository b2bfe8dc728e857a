"""The command `kumi doctor --gpu`: its report, its exit code, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kumi.cli import main
from kumi.validation import run_parts
from kumi.validation.part import Part


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """A function that gives the command these parts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)

    def give(*functions):
        table = tuple(Part(name, f"trial_parts:{name}", 30.0, "A trial.") for name in functions)
        monkeypatch.setattr(run_parts, "PARTS", table)

    return give


def test_it_prints_the_parts_and_where_the_report_is(parts, capsys):
    parts("sound", "skipped")
    assert main(["doctor", "--gpu", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:2]] == [["sound", "ok"], ["skipped", "skipped"]]
    assert "kumi-gpu-report/gpu-report.md, and the same as data in kumi-gpu-report/gpu-report.json" in out
    assert "Please read it before you send it" in out
    assert "| a figure | 12.5 |" in Path("kumi-gpu-report/gpu-report.md").read_text()


def test_a_part_that_crashes_is_the_exit_code(parts, capsys):
    parts("killed", "sound")
    assert main(["doctor", "--gpu", "--device", "cpu", "--out", "here", "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(Path("here/gpu-report.json").read_text())
    assert [part["status"] for part in printed["parts"]] == ["crashed", "ok"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--device", "cpu"], "doctor: --device has no effect without --gpu; add --gpu, or remove --device"),
        (["--out", "here"], "doctor: --out has no effect without --gpu"),
        (["--gpu", "--nodes"], "doctor: --gpu examines this machine's GPU by itself, without --nodes"),
        (["run.toml", "--gpu"], "doctor: --gpu examines this machine's GPU by itself, without a run file"),
        (["--gpu"], "doctor: --gpu, and nvidia-smi lists no GPU here; run it on a machine with one, or try the report"),
    ],
)
def test_refusals(words, reason, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kumi.config.local_machine._gpus", list)
    assert main(["doctor", *words]) == 2
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
