"""The closing summary of a run: its figures, and next commands that work."""

import contextlib
import shlex
from pathlib import Path

import pytest
from tests.train.conftest import back_to, losses, metrics, run_file

from kumi.cli import main
from kumi.config import load, resolve
from kumi.errors import INTERRUPTED, OK
from kumi.train.run_summary import next_commands, summary_lines, train_output


def run_command(command):
    program, *words = shlex.split(command)
    assert program == "kumi"
    assert main(words) == 0, command


@pytest.fixture
def finished(small, tmp_path, monkeypatch):
    folder = small.copy(tmp_path)
    monkeypatch.chdir(folder)
    return resolve(load(run_file(folder)))


def test_a_finished_run_says_what_it_did_and_what_can_follow(finished, small, capsys):
    output, losses_of_steps = train_output(finished.config), losses(small.folder / "run")
    assert (output.global_step, output.max_steps, output.stopped) == (6, 6, False)
    tokens = max(entry.get("tokens", 0) for entry in metrics(small.folder / "run"))
    assert output.num_input_tokens_seen == tokens > 1000
    assert output.train_losses == (losses_of_steps[1], losses_of_steps[6])
    assert output.training_loss == pytest.approx(sum(losses_of_steps.values()) / 6)
    assert len(output.eval_losses) == 2
    assert (output.model_dir, output.checkpoint) == (Path("run/hf"), Path("run/checkpoints/step_000006"))
    assert output.train_runtime > 0
    assert main(["train", "run.toml"]) == 0
    printed = capsys.readouterr().out
    assert "summary    already finished: 6 steps, 1.5" in printed
    assert printed.endswith("".join(f"{line}\n" for line in summary_lines(finished, already_finished=True)))
    commands = list(next_commands(finished, output))
    assert len(commands) == 3
    for command in commands:
        run_command(command)
    assert "tokens/s" in capsys.readouterr().err


def test_an_interrupted_run_says_how_far_it_came(finished):
    back_to(finished.out, 4)
    output = train_output(finished.config, INTERRUPTED)
    assert (output.global_step, output.stopped, output.model_dir) == (4, True, None)
    assert summary_lines(finished, INTERRUPTED)[0].startswith("summary    interrupted: 4 of 6 steps, ")
    for command in next_commands(finished, output, INTERRUPTED):
        run_command(command)


def test_without_an_export_the_checkpoint_can_be_converted(finished):
    with contextlib.chdir(finished.out.parent):
        quiet = resolve(load("run.toml", ["export.enabled=false"]))
        output = train_output(quiet.config)
        assert output.model_dir is None
        for name in ("bfloat16", "bfloat16-2"):
            command = next(next_commands(quiet, output))
            assert command.startswith(f"kumi convert run/checkpoints/step_000006 run/{name} --to hf")
            (finished.out / name).mkdir()


def test_commands_after_a_run_on_several_machines_leave_out_kumi_train(finished):
    several = resolve(load("run.toml", ["cluster.nodes=2"]))
    for code, verbs in ((OK, ["convert", "data", "generate"]), (INTERRUPTED, ["describe", "data"])):
        commands = next_commands(several, train_output(several.config, code), code)
        assert [command.split()[1] for command in commands] == verbs
