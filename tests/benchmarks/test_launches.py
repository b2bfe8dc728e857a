"""What a layer asks of a GPU stays within committed bounds: launches, element-wise bytes, waits of the host."""

from __future__ import annotations

import json
from pathlib import Path

import launches
import pytest
import torch
from launches import CASES, Case, CountLaunches, HostWaits, measure

from triton_process import compiling

# Case -> at most so many launches of a layer, forward and backward, and gigabytes of element-wise operations.
BOUNDS = {
    "dense": (24, 38, 8.6),
    "packed": (24, 40, 8.6),
    "float32 weights": (26, 47, 9.9),
    "selective": (24, 53, 11.7),
    "full": (24, 60, 11.7),
    "experts": (67, 136, 15.5),
    "dense, kernels": (16, 28, 6.3),
    "experts, kernels": (35, 54, 6.0),
}
COMMITTED = json.loads((Path(launches.__file__).parent / "results" / "launches.json").read_text())


@pytest.mark.parametrize("name", [name for name in BOUNDS if not CASES[name].kernels])
def test_a_layer_stays_within_its_bounds(name):
    """No microbatch waits for the GPU, either: `measure` refuses to count one that does."""
    _check(name)


@pytest.mark.parametrize("name", [name for name in BOUNDS if CASES[name].kernels])
@compiling
def test_a_layer_with_kernels_stays_within_its_bounds(name):
    _check(name)


def _check(name):
    forward, backward, gigabytes = BOUNDS[name]
    result = measure(CASES[name])
    assert result["forward"]["launches"] <= forward
    assert result["backward"]["launches"] <= backward
    assert result["forward"]["gigabytes"] + result["backward"]["gigabytes"] <= gigabytes
    assert result["update"]["launches"] == 0, "the update has as many launches with any number of layers"
    assert result == COMMITTED[name], "run benchmarks/launches.py --json benchmarks/results/launches.json"


def test_an_operator_that_the_host_waits_for_is_refused(monkeypatch):
    def waiting(tokens, document_ids, cu_seqlens=None):
        document_ids[0, -1].item()

    monkeypatch.setattr(launches, "_attention", waiting)
    with pytest.raises(HostWaits, match="_local_scalar_dense makes the host wait"):
        launches.count(Case(CASES["dense"].config, documents=2), 1)


def test_launches_and_bytes_are_counted_by_operator():
    rows, index = torch.zeros(100, 4), torch.zeros(10, dtype=torch.int64)
    with CountLaunches() as counter:
        rows.view(50, 8).add_(1)
        rows[index]
        torch.mm(rows, rows.T)
    load = counter.loads["forward"]
    assert load.launches == {"add_": 1, "index": 1, "mm": 1}
    assert load.bytes == {"add_": 2 * rows.nbytes, "index": 2 * 10 * 4 * 4, "mm": 0}
