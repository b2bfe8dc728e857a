"""A run with another batch source than the mixture trains, saves the source's state, and resumes."""

import contextlib
import functools
from dataclasses import dataclass

import pytest
from tests.train.conftest import back_to, losses

from kumi.cli import main
from kumi.storage import checkpoint
from kumi.train import loop


@dataclass
class Buffer:
    """A list of batches, one of them a step; it can only go on from a step that it was told about."""

    batches: list
    first: int

    def at(self, step):
        assert step >= self.first
        return self.batches[step % len(self.batches)]

    def state(self, step):
        return {"buffer_steps": step}


def open_buffer(run, mixture, index, saved):
    """Four batches of the mixture, in an order of their own."""
    share = run.batch.sequences // run.layout.dp
    order = (7, 3, 5, 1)
    batches = [mixture.batch(number * run.batch.sequences + index * share, share) for number in order]
    return Buffer(batches, 0 if saved is None else saved["buffer_steps"])


@pytest.fixture
def from_buffer(monkeypatch):
    train_rank = functools.partial(loop.train_rank, open_source=open_buffer)
    monkeypatch.setattr(loop, "train_rank", train_rank)


def train(folder, *overrides):
    with contextlib.chdir(folder):
        return main(["train", "run.toml", "train.out=buffered", *overrides])


def test_a_second_source_trains_and_resumes(small, tmp_path, from_buffer):
    folder = small.copy(tmp_path)
    assert train(folder) == 0
    whole = losses(folder / "buffered")
    assert whole[6] < whole[1] - 0.5
    assert whole[1] != losses(folder / "run")[1]  # its first batch is another one
    meta = checkpoint.open(folder / "buffered/checkpoints/step_000004").meta
    assert meta["buffer_steps"] == 4
    assert "sequences" not in meta
    back_to(folder / "buffered", 4)
    assert train(folder) == 0
    assert losses(folder / "buffered") == whole


def test_ranks_ask_their_own_sources(small, tmp_path, from_buffer):
    folder = small.copy(tmp_path)
    assert train(folder) == 0
    alone = losses(folder / "buffered")
    back_to(folder / "buffered", 2)
    assert train(folder, "cluster.devices_per_node=2", "layout.zero=2") == 0
    assert losses(folder / "buffered") == pytest.approx(alone, rel=1e-4)
