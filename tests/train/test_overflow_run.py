"""A float16 run whose gradients overflow in every step: skipped updates are counted, shown, and end the run."""

import contextlib
import shutil
import time
from pathlib import Path

import pytest
import torch
from tests.train.conftest import metrics, run_file

from kumi.cli import main
from kumi.parallel.grad_norm import HOPELESS_SKIPS, LossScale
from kumi.storage import checkpoint
from kumi.train import step as train_step


def norms(values, scale=None):
    scale = LossScale() if scale is None else scale
    for value in values:
        scale = scale.after(torch.tensor(float(value)))
    return scale


def test_the_scale_stays_at_one_and_counts_what_is_skipped():
    scale = norms(["inf"] * 16)
    assert (scale.scale, scale.skipped, scale.in_a_row, scale.hopeless) == (1.0, 16, 16, False)
    assert norms(["inf"] * (HOPELESS_SKIPS - 16), scale).hopeless
    assert not norms(["inf"] * (HOPELESS_SKIPS - 1), norms(["inf"] * 3 + [1.0])).hopeless
    after_one = norms([1.0], scale)
    assert (after_one.scale, after_one.skipped, after_one.in_a_row) == (1.0, 16, 0)
    assert not norms(["inf"] * HOPELESS_SKIPS, LossScale(2.0**30)).hopeless  # a smaller scale is left to try


@pytest.fixture
def overflowing(small, tmp_path, monkeypatch):
    """A folder whose float16 runs overflow from the step after `good` ones on, and how to train in it."""
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    clip = train_step.clip_gradients

    def overflow(model, *arguments, **options):
        next(model.parameters()).grad.fill_(float("inf"))
        return clip(model, *arguments, **options)

    def train(steps, *words, overflows=True):
        monkeypatch.setattr(train_step, "clip_gradients", overflow if overflows else clip)
        with contextlib.chdir(folder):
            file = run_file(
                folder,
                precision={"kind": "fp16"},
                train={"steps": steps, "out": "run"},
                optim={"lr": 1e-3, "schedule": "constant", "warmup_steps": 2},
            )
            return main(["train", str(file), "export.enabled=false", *words])

    return folder / "run", train


def test_a_run_that_learns_nothing_is_diverged_and_a_resume_keeps_the_count(overflowing, capfd):
    run, train = overflowing
    assert train(5) == 6
    error = capfd.readouterr().err
    assert "step 5: the float16 gradients overflowed in the last 5 steps, down to a loss scale of 2048" in error
    assert "precision.kind=" in error
    # With more steps it goes on from the checkpoint after step 4, four updates skipped already, to the end of hope.
    assert train(40, "--allow-change", "train.steps") == 6
    printed = capfd.readouterr()
    assert f"step {HOPELESS_SKIPS}: the float16 gradients overflowed in the last {HOPELESS_SKIPS} steps" in printed.err
    assert "down to a loss scale of 1, " in printed.err
    assert "  skipped 5  " in printed.out
    counts = [(entry["train/skipped_updates"], entry["train/loss_scale"]) for entry in metrics(run)]
    assert counts[:5] == [(step, 2.0 ** (16 - step)) for step in range(1, 6)]
    assert checkpoint.open(checkpoint.latest(run / "checkpoints")).meta["skipped_in_a_row"] == 18


def test_a_save_in_the_background_is_completed_where_the_run_diverges(overflowing, capfd, monkeypatch):
    run, train = overflowing
    rename = Path.rename

    def slowly(path, target):
        time.sleep(1.0)
        return rename(path, target)

    assert train(5, "checkpoint.every=4") == 6
    shutil.rmtree(run / "checkpoints" / "step_000004")
    monkeypatch.setattr(Path, "rename", slowly)
    assert train(5, "checkpoint.every=4") == 6
    assert checkpoint.latest(run / "checkpoints").name == "step_000004"


def test_a_few_skipped_updates_are_only_shown(overflowing, capfd):
    run, train = overflowing
    assert train(3, "checkpoint.every=1", "checkpoint.asynchronous=false") == 6
    shutil.rmtree(run / "checkpoints" / "step_000002")
    assert train(3, overflows=False) == 0
    assert "  skipped 1  " in capfd.readouterr().out
    assert [entry["train/skipped_updates"] for entry in metrics(run) if "train/loss" in entry] == [1, 1, 1]
