"""Runs with offloading have the same losses, and any layout resumes their checkpoints."""

import contextlib
import shutil

import pytest
from tests.train.conftest import back_to, losses, run_file

from kumi.cli import main

MACHINE = """
devices_per_node = 2
[device]
name = "CPU"
kind = "cpu"
memory = "4 GiB"
dtypes = ["float32"]
[[links]]
name = "memory"
span = 2
efficiency = 0.8
bandwidth = "5 GB/s"
latency = "5 us"
[host]
memory = "16 GiB"
device_bandwidth = "5 GB/s"
nvme = "16 GiB"
nvme_bandwidth = "1 GB/s"
"""


def train(folder, **changes):
    with contextlib.chdir(folder):
        return main(["train", str(run_file(folder, **changes))])


@pytest.mark.parametrize(
    ("layout", "others"),
    [
        ({"dp_shard": 2, "zero": 1, "offload": "optimizer-nvme"}, {"comm": {"prefetch": 1}}),
        ({"dp_shard": 2, "zero": 3, "offload": "states"}, {}),
        ({"dp_replicate": 2, "offload": "activations", "tiles": 4}, {"comm": {"bucket_mb": 1.0}}),
    ],
)
def test_a_run_learns_the_same_and_goes_on_elsewhere(small, tmp_path, layout, others):
    folder, expected = small.copy(tmp_path), losses(small.folder / "run")
    shutil.rmtree(folder / "run")
    (folder / "machine.toml").write_text(MACHINE)
    assert train(folder, cluster={"source": "machine.toml"}, layout=layout, **others) == 0
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-4)
    assert list(folder.glob("run/offload/*")) == []
    back_to(folder / "run", 4)
    assert train(folder) == 0
    assert losses(folder / "run") == pytest.approx(expected, rel=1e-4)
