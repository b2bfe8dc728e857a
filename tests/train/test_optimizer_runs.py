"""Runs with other optimizers than AdamW save, and resume exactly, also in another layout."""

import contextlib
import shutil

import pytest
from tests.train.conftest import back_to, losses, run_file

from kumi.cli import main


def train(folder, **changes):
    with contextlib.chdir(folder):
        return main(["train", str(run_file(folder, **changes))])


@pytest.mark.parametrize(
    ("kind", "layout"), [("muon", {"dp_shard": 2, "zero": 3}), ("adamw-8bit", {}), ("adafactor", {}), ("sgd", {})]
)
def test_a_run_goes_on_to_the_bit_and_on_another_layout(small, tmp_path, kind, layout):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    ranks = 2 if layout else 1
    here = {"cluster": {"devices_per_node": ranks}, "layout": layout, "optim__kind": kind}
    assert train(folder, **here) == 0
    expected = losses(folder / "run")
    assert expected[6] < expected[1]
    back_to(folder / "run", 4)
    assert train(folder, **here) == 0
    assert losses(folder / "run") == expected
    if ranks > 1:
        back_to(folder / "run", 4)
        assert train(folder, optim__kind=kind) == 0
        assert losses(folder / "run") == pytest.approx(expected, rel=1e-4)
