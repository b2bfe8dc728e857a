"""Fixtures of the GPU tests. They run on CUDA; KUMI_TEST_DEVICE=cpu tries their code on the CPU instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "parity"), str(TESTS / "gpu"), str(TESTS.parent / "benchmarks")]


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The device under test, with its memory given back afterwards."""
    name = os.environ.get("KUMI_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none here")
    yield torch.device(name, 0) if name == "cuda" else torch.device(name)
    torch.compiler.reset()
    if name == "cuda":
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses `device` with `gpu`."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()) and Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
