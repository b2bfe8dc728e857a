"""A resumed run keeps the warm-up that it began with."""

import contextlib
import shutil

import pytest
from tests.train.conftest import back_to, metrics, run_file

from kumi.cli import main
from kumi.config import load, resolve
from kumi.train.warmup import with_stored_warmup


def train(folder, optim, *words):
    with contextlib.chdir(folder):
        return main(["train", str(run_file(folder, optim={"lr": 1e-2, **optim})), *words])


def rates(folder):
    return {entry["step"]: entry["train/lr"] for entry in metrics(folder / "run") if "train/lr" in entry}


def test_more_steps_do_not_lengthen_the_warm_up(small, tmp_path, capfd):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    assert train(folder, {"warmup_ratio": 0.4}, "train.steps=5", "export.enabled=false") == 0
    assert rates(folder)[1] == pytest.approx(5e-3)
    back_to(folder / "run", 2)
    longer = ("train.steps=10", "export.enabled=false")
    assert train(folder, {"warmup_ratio": 0.4}, *longer, "--allow-change", "train.steps") == 0
    assert "the warm-up stays 2 steps" in capfd.readouterr().out
    assert rates(folder)[3] == pytest.approx(1e-2)  # four steps would give 7.5e-3 here
    assert train(folder, {"warmup_ratio": 0.5}, *longer) == 2
    assert "optim.warmup_ratio: 0.4 -> 0.5" in capfd.readouterr().err
    assert train(folder, {"warmup_ratio": 0.4}, *longer) == 0


def test_a_checkpoint_from_before_the_ratio_says_nothing(tmp_path):
    run = resolve(load(run_file(tmp_path, optim={"lr": 1e-2})))
    assert with_stored_warmup(run, {"step": 2}) is run
    assert with_stored_warmup(run, {"step": 2, "warmup_steps": 4, "warmup_ratio": 0.5}) is run
    assert with_stored_warmup(run, {"step": 2, "warmup_steps": 4, "warmup_ratio": 0.03}).optim.warmup_steps == 4
