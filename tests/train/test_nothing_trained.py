"""A step that trains no token stops the run in a sentence; a rank with none beside another that has some does not."""

import contextlib
import functools
from dataclasses import dataclass

import numpy as np
import pytest
from tests.train.conftest import losses

from kumi.cli import main
from kumi.data import MixtureSource
from kumi.data.row_source import LOSS_WEIGHTS
from kumi.errors import DataError
from kumi.objectives import IGNORED
from kumi.storage import checkpoint
from kumi.train import loop
from kumi.train.open_batches import mixture_source


@dataclass(frozen=True)
class Masked:
    """The batches of a mixture. Step number 3 trains nothing on the ranks `indexes`: labels are masked, or weigh 0."""

    source: MixtureSource
    indexes: tuple[int, ...]
    by_weight: bool = False

    def at(self, step):
        batch = dict(self.source.at(step))
        masked = step == 2 and self.source.index in self.indexes
        if self.by_weight:
            return batch | {LOSS_WEIGHTS: np.full(batch["labels"].shape, 0 if masked else 1, np.float32)}
        return batch | {"labels": np.full_like(batch["labels"], IGNORED)} if masked else batch

    def state(self, step):
        return self.source.state(step)


def train(folder, patch, indexes, *overrides, by_weight=False):
    def open_source(*arguments):
        return Masked(mixture_source(*arguments), indexes, by_weight)

    patch.setattr(loop, "train_rank", functools.partial(loop.train_rank, open_source=open_source))
    with contextlib.chdir(folder):
        return main(["train", "run.toml", "train.out=masked", "train.steps=4", *overrides])


@pytest.mark.parametrize(
    ("by_weight", "reason"), [(False, "all its labels are masked"), (True, "the weights of its 255 tokens are 0")]
)
def test_a_step_that_trains_nothing_stops_the_run_and_names_its_sequences(
    small, tmp_path, monkeypatch, capfd, by_weight, reason
):
    folder = small.copy(tmp_path)
    assert train(folder, monkeypatch, (0,), by_weight=by_weight) == DataError.exit_code
    printed = " ".join(capfd.readouterr().err.split())
    assert f"step 3, sequences 16 to 23 of the data: no token is trained, because {reason};" in printed
    assert list(losses(folder / "masked")) == [1, 2]
    assert checkpoint.open(folder / "masked/checkpoints/step_000002").meta["sequences"] == 16


def test_a_rank_without_a_token_trains_beside_one_that_has_some(small, tmp_path, monkeypatch):
    folder = small.copy(tmp_path)
    assert train(folder, monkeypatch, (1,), "cluster.devices_per_node=2", "layout.zero=2", "export.enabled=false") == 0
    values = losses(folder / "masked")
    assert len(values) == 4
    assert values[3] > 1  # the mean over the other rank's tokens alone
