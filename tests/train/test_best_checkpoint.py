"""The checkpoint of the best evaluation is kept and named, and a run ends when evaluations stop getting better."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from tests.train.conftest import back_to, metrics, run_file

from kumi.cli import main
from kumi.errors import ConfigError
from kumi.objectives import OBJECTIVES
from kumi.storage.folders import list_complete, step_of
from kumi.train.best_checkpoint import BestSoFar, check_metric, is_higher_better


@pytest.fixture
def folder(small, tmp_path):
    """A folder with the documents and the tokens of the small run."""
    for name in ("documents.jsonl", "tokens"):
        source = small.folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path


def _train(folder, *overrides, steps=8, **checkpoint):
    file = run_file(
        folder,
        train={"steps": steps, "out": "run"},
        eval={"every": 1},
        checkpoint={"every": 2, "keep": 1, "best": "eval/loss", **checkpoint},
        optim={"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
    )
    with contextlib.chdir(folder):
        return main(["train", str(file), *overrides])


def _evaluations(folder):
    with contextlib.chdir(folder):
        return {entry["step"]: entry["eval/loss"] for entry in metrics("run") if "eval/loss" in entry}


def _best(folder):
    return json.loads((folder / "run" / "checkpoints" / "best.json").read_text())


def _steps(folder):
    return [step_of(path) for path in list_complete(folder / "run" / "checkpoints")]


def test_the_best_checkpoint_is_kept_beside_the_newest(folder, capfd):
    # The rate makes the loss rise again after a few steps.
    assert _train(folder, "optim.lr=1.0") == 0
    losses = _evaluations(folder)
    best = min(losses, key=losses.get)
    assert best < 8
    assert _best(folder) == {"step": best, "metric": "eval/loss", "value": losses[best]}
    assert _steps(folder) == [best, 8]
    output = capfd.readouterr().out
    assert f"best eval/loss {losses[best]:.4f}, with the checkpoint of step {best}" in output
    assert f"kumi convert run/checkpoints/step_{best:06d} run/best --to hf" in output


def test_a_resumed_run_remembers_the_best(folder):
    assert _train(folder, "optim.lr=0.3", keep=9) == 0
    before, best, evaluations = _steps(folder), _best(folder), _evaluations(folder)
    with contextlib.chdir(folder):
        back_to("run", 4)
    assert _train(folder, "optim.lr=0.3", keep=9) == 0
    assert (_steps(folder), _best(folder), _evaluations(folder)) == (before, best, evaluations)


def test_patience_ends_a_run_that_gets_no_better(folder, capfd):
    patience = ("train.patience=2", "optim.lr=0.3")
    assert _train(folder, *patience, steps=40) == 0
    losses, best = _evaluations(folder), _best(folder)["step"]
    assert max(losses) == best + 2 < 40
    output = capfd.readouterr().out
    assert f"ended after step {best + 2}: eval/loss was best after step {best}" in output
    assert "finished:" in output
    assert (folder / "run" / "hf" / "model.safetensors").exists()
    assert _train(folder, *patience, steps=40) == 0  # it stays finished
    assert "already finished" in capfd.readouterr().out
    assert _evaluations(folder) == losses
    longer = ("train.patience=0", "optim.lr=0.3", "--allow-change", "train.patience")
    assert _train(folder, *longer, steps=best + 4) != 0 or max(_evaluations(folder)) > best + 2


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["checkpoint.best='eval/accuracy'"], "is no metric of this run's evaluations; they have eval/loss"),
        (["eval.every=0"], "needs evaluations during training; set eval.every"),
        (["data.validation=0.0"], "needs held-out data"),
    ],
)
def test_a_metric_that_is_never_measured_is_refused(folder, capfd, overrides, reason):
    assert _train(folder, *overrides) == 2
    assert reason in capfd.readouterr().err


def test_patience_without_a_metric_is_refused(folder, capfd):
    file = run_file(folder, train={"steps": 8, "out": "run", "patience": 2})
    with contextlib.chdir(folder):
        assert main(["train", str(file)]) == 2
    assert "needs a metric that it waits for; set checkpoint.best" in capfd.readouterr().err


def test_a_metric_has_a_direction_or_is_refused():
    for metric in ("loss", "loss/chats", "kl", "entropy"):
        assert not is_higher_better(metric)
    for metric in ("rewards/accuracies", "rewards/margins/pairs", "mean_token_accuracy", "rewards/chosen"):
        assert is_higher_better(metric)
    with pytest.raises(ConfigError, match="has no direction in which it is better"):
        is_higher_better("rewards/rejected")
    check_metric("eval/rewards/accuracies", OBJECTIVES["dpo"](), ["pairs"])
    check_metric("eval/kl/a", OBJECTIVES["kto"](), ["a", "b"])
    with pytest.raises(ConfigError, match="they have eval/loss, eval/entropy, eval/mean_token_accuracy"):
        check_metric("eval/rewards/accuracies", OBJECTIVES["sft"](), ["pairs"])


def test_the_best_of_several_values():
    best = BestSoFar("rewards/accuracies", [{"step": 1, "eval/rewards/accuracies": 0.5}, {"step": 1, "loss": 1.0}])
    assert (best.step, best.value, best.since) == (1, 0.5, 0)
    assert not best.add(2, 0.5)
    assert best.add(3, 0.75)
    assert not best.add(4, None)
    assert (best.step, best.value, best.since) == (3, 0.75, 1)
