"""The checkpoint of the best evaluation is kept and named, and a run ends when evaluations stop getting better."""

from __future__ import annotations

import contextlib
import json
import math
import shutil

import pytest
from tests.train.conftest import back_to, metrics, run_file

from kumi.cli import main
from kumi.errors import ConfigError
from kumi.objectives import OBJECTIVES
from kumi.storage.folders import list_complete, step_folder, step_of
from kumi.train.best_checkpoint import (
    BestSoFar,
    best_of_run,
    check_metric,
    ended_early,
    evaluated_metrics,
    is_higher_better,
    rewrite_best,
)


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
    assert "kumi convert run run/best --checkpoint best" in output
    with contextlib.chdir(folder):
        assert main(["convert", "run", "run/best", "--checkpoint", "best"]) == 0
    assert f"| steps | {best} |" in (folder / "run/best/README.md").read_text()


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
    assert "kumi train run/config.toml train.patience=0 --allow-change train.patience" in output
    assert f"| steps | {best + 2} |" in (folder / "run" / "hf" / "README.md").read_text()
    longer = ("train.patience=3", "optim.lr=0.3", "--allow-change", "train.patience")
    assert _train(folder, *longer, steps=40) == 0
    assert max(_evaluations(folder)) > best + 2


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["checkpoint.best='eval/accuracy'"], "is no metric of this run's evaluations; the metrics are eval/loss"),
        (["checkpoint.best='eval/los'"], "did you mean 'eval/loss'? the metrics are eval/loss"),
        (["eval.every=0"], "needs evaluations during training; set eval.every"),
        (["data.validation=0.0"], "needs held-out data; set data.validation above 0"),
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
    # The names of sources decide nothing.
    for metric in ("loss", "loss/chats", "loss/chosen", "loss/my_accuracy", "kl", "entropy", "entropy/margins"):
        assert not is_higher_better(metric)
    for metric in ("rewards/accuracies", "rewards/margins/pairs", "mean_token_accuracy", "rewards/chosen"):
        assert is_higher_better(metric)
    for metric in ("rewards/rejected", "rewards/rejected/chosen", "logps/rejected"):
        with pytest.raises(ConfigError, match="has no direction in which it is better"):
            is_higher_better(metric)
    check_metric("eval/rewards/accuracies", OBJECTIVES["dpo"](), ["pairs"])
    check_metric("eval/kl/a", OBJECTIVES["kto"](), ["a", "b"])
    with pytest.raises(ConfigError, match="the metrics are eval/loss, eval/entropy, eval/mean_token_accuracy"):
        check_metric("eval/rewards/accuracies", OBJECTIVES["sft"](), ["pairs"])
    # The list of metrics comes before the question of their direction.
    hint = (
        "is no metric of this run's evaluations; did you mean 'eval/rewards/accuracies'\\? the metrics are eval/loss, "
    )
    for wrong in ("eval/rewards/acuracies", "eval/reward/accuracies"):
        with pytest.raises(ConfigError, match=hint):
            check_metric(wrong, OBJECTIVES["dpo"](), ["pairs"])
    with pytest.raises(ConfigError, match="'eval/logps/rejected' has no direction"):
        check_metric("eval/logps/rejected", OBJECTIVES["dpo"](), ["pairs"])
    with pytest.raises(ConfigError, match="needs held-out data, but the data is so small"):
        check_metric("eval/loss", OBJECTIVES["lm"](), [])


def test_every_metric_of_an_objective_may_name_the_best_except_those_of_rejected_replies():
    for objective in (kind() for kind in OBJECTIVES.values()):
        for name in evaluated_metrics(objective):
            if not name.endswith("/rejected"):
                check_metric(f"eval/{name}", objective, ["pairs"])


def test_the_best_of_several_values():
    best = BestSoFar("rewards/accuracies", [_entry(1, 0.7, **{"eval/rewards/accuracies": 0.5}), {"step": 1}])
    assert (best.step, best.value, best.since) == (1, 0.5, 0)
    assert not best.add(2, 0.5)
    assert best.add(3, 0.75)
    assert not best.add(4, None)
    assert (best.step, best.value, best.since) == (3, 0.75, 1)


def test_a_value_that_is_not_finite_is_never_the_best():
    best = BestSoFar("loss")
    assert not best.add(1, math.nan)
    assert (best.step, best.since) == (None, 0)
    assert best.add(2, 1.0)
    assert not best.add(3, math.nan)
    # metrics.jsonl has null for NaN, so a resumed run counts the same.
    again = BestSoFar("loss", [_entry(1, None), _entry(2, 1.0), _entry(3, None)])
    assert (best.step, best.since) == (again.step, again.since) == (2, 1)


def test_the_best_has_a_checkpoint(tmp_path):
    """Also of a run whose first launches had no checkpoint.best, or another."""
    _write_run(tmp_path, [0.1, 0.9, 0.3, 0.5, 0.2], stored=[2, 4])
    best = best_of_run(tmp_path, "eval/loss")
    assert (best.step, best.value, best.since) == (4, 0.5, 0)  # the fifth was evaluated, but not saved
    rewrite_best(tmp_path, best)
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["step"] == 4
    shutil.rmtree(step_folder(tmp_path / "checkpoints", 4))
    assert best_of_run(tmp_path, "eval/loss").step == 2
    rewrite_best(tmp_path, None)
    assert not (tmp_path / "checkpoints" / "best.json").exists()


def test_a_run_has_ended_early_only_if_its_last_evaluations_were_no_better(tmp_path):
    _write_run(tmp_path, [1.0, 2.0, 2.0, 0.5], stored=[1, 4])
    assert ended_early(tmp_path, "eval/loss", 2) is None  # it was trained on, and got better
    _write_run(tmp_path, [1.0, 2.0, 2.0, 0.5, 0.6, 0.6], stored=[6])
    assert ended_early(tmp_path, "eval/loss", 2) == 6
    assert ended_early(tmp_path, "eval/loss", 3) is None
    assert ended_early(tmp_path, "eval/loss", 0) is None
    shutil.rmtree(step_folder(tmp_path / "checkpoints", 6))
    assert ended_early(tmp_path, "eval/loss", 2) is None


def _entry(step, loss, **others):
    return {"step": step, "eval/loss": loss, **others}


def _write_run(out, losses, stored):
    """Write an evaluation of every step, and the folders of the checkpoints `stored`."""
    lines = [json.dumps(_entry(step, loss)) + "\n" for step, loss in enumerate(losses, 1)]
    (out / "metrics.jsonl").write_text("".join(lines))
    for step in stored:
        step_folder(out / "checkpoints", step).mkdir(parents=True, exist_ok=True)
