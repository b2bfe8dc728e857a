"""The closing summary of a run: its figures, and next commands that work."""

import contextlib
import json
import shlex

import pytest
from tests.train.conftest import back_to, losses, metrics, run_file

from kumi.cli import main
from kumi.config import load, resolve
from kumi.errors import INTERRUPTED, OK
from kumi.train.summary import lines, summary


def run_command(command):
    words = shlex.split(command)
    if words[0] == "kumi":
        assert main(words[1:]) == 0, command
    else:
        assert words[:2] == ["python", "-c"], command
        exec(words[2], {})


@pytest.fixture
def finished(small, tmp_path, monkeypatch):
    folder = small.copy(tmp_path)
    monkeypatch.chdir(folder)
    return resolve(load(run_file(folder)))


def test_a_finished_run_says_what_it_did_and_what_can_follow(finished, small, capsys):
    found = summary(finished)
    losses_of_steps = losses(small.folder / "run")
    assert json.loads(json.dumps(found)) == found
    assert (found["status"], found["steps"], found["of_steps"]) == ("finished", 6, 6)
    assert found["tokens"] == max(entry.get("tokens", 0) for entry in metrics(small.folder / "run")) > 1000
    assert found["train_loss"] == [losses_of_steps[1], losses_of_steps[6]]
    assert len(found["validation_loss"]) == 2
    assert (found["model"], found["checkpoint"]) == ("run/hf", "run/checkpoints/step_000006")
    assert found["seconds"] > 0
    assert main(["train", "run.toml"]) == 0
    printed = capsys.readouterr().out
    assert "summary    already finished: 6 steps, 1.5" in printed
    assert printed.endswith("".join(f"{line}\n" for line in lines(summary(finished, anew=False))))
    assert len(found["next"]) == 3
    for command in found["next"]:
        run_command(command)
    assert "Decoder" in capsys.readouterr().out


def test_an_interrupted_run_says_how_far_it_came(finished):
    back_to(finished.out, 4)
    found = summary(finished, INTERRUPTED)
    assert (found["status"], found["steps"], found["model"]) == ("interrupted", 4, None)
    assert lines(found)[0].startswith("summary    interrupted: 4 of 6 steps, ")
    for command in found["next"]:
        run_command(command)


def test_without_an_export_the_checkpoint_can_be_converted(finished):
    with contextlib.chdir(finished.out.parent):
        quiet = resolve(load("run.toml", ["export.enabled=false"]))
        found = summary(quiet)
        (finished.out / "bfloat16").mkdir()
        again = summary(quiet)
    assert again["next"][0].startswith("kumi convert run/checkpoints/step_000006 run/bfloat16-2 --to hf")
    assert found["model"] is None
    assert found["next"][0].startswith("kumi convert run/checkpoints/step_000006 run/bfloat16 --to hf")


def test_commands_after_a_run_on_several_machines_leave_out_kumi_train(finished):
    several = resolve(load("run.toml", ["cluster.nodes=2"]))
    for code, verbs in ((OK, ["convert", "data"]), (INTERRUPTED, ["describe", "data"])):
        commands = summary(several, code)["next"]
        assert [command.split()[1] for command in commands if command.startswith("kumi")] == verbs
