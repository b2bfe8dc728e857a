"""The kill storm distributes its kills, reads the output of a start, and counts faults; the storm runs with --all."""

from __future__ import annotations

import json
import time
from pathlib import Path

import kill_storm
import pytest

RESULT = Path(kill_storm.__file__).parent / "results" / "kill_storm.json"


def test_kills_are_dealt_evenly():
    assert list(kill_storm.kills_per_layout(12, list(kill_storm.LAYOUTS)).values()) == [3, 3, 2, 2, 2]


def test_the_step_that_a_start_goes_on_from():
    assert kill_storm.resumed_after("data ...\nresumed after step 12 (3072 tokens, 96 sequences)\nstep 13/60") == 12
    assert kill_storm.resumed_after("step 1/60") is None


def test_whatever_is_wrong_is_in_the_summary(tmp_path):
    kill = kill_storm.Kill("DDP", "save", "launcher", 5, in_save=True, checkpoint=3, exit_code=-9, resumed_after=2)
    outcome = kill_storm.Outcome("DDP", [kill])
    kill_storm._check_resumed(kill, 3, outcome)
    (tmp_path / "kumi-launch-x").mkdir()
    (tmp_path / f"{kill_storm.TORCH_CACHE}root").mkdir()
    summary = kill_storm.summary([outcome], kill_storm.leftovers(tmp_path, kill_storm.shared_memory()), seed=0)
    assert summary["faults"] == ["DDP: went on after step 2, not 3", f"{tmp_path / 'kumi-launch-x'} was left"]
    assert (summary["kills"], summary["kills_in_saves"], summary["kills_of_launchers"]) == (1, 1, 1)


def test_what_a_dead_command_left_is_no_save(tmp_path):
    (tmp_path / "step_000003.tmp").mkdir()
    assert kill_storm.is_saving(tmp_path, time.time() - 60)
    assert not kill_storm.is_saving(tmp_path, time.time() + 60)


def test_the_committed_storm_lost_nothing():
    summary = json.loads(RESULT.read_text())
    assert summary["kills"] >= 40
    assert {outcome["layout"] for outcome in summary["layouts"] if len(outcome["kills"]) >= 8} == set(
        kill_storm.LAYOUTS
    )
    assert summary["faults"] == []


@pytest.mark.exhaustive
def test_a_small_storm(tmp_path):
    assert kill_storm.main(["--kills", "2", "--only", "ZeRO-3", "--work", str(tmp_path / "work")]) == 0
