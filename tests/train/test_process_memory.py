"""The measured memory of a process on a CPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from kumi.train.process_memory import baseline_memory, peak_memory

CPU, MIB = torch.device("cpu"), 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_is_of_what_came_after_the_beginning(tmp_path):
    before = np.ones(200 * MIB, np.uint8)
    del before
    beginning = baseline_memory(CPU)
    assert peak_memory(CPU) - beginning < 20 * MIB
    after = np.ones(100 * MIB, np.uint8)
    del after
    assert 95 * MIB < peak_memory(CPU) - beginning < 120 * MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_pages_of_files_do_not_count(tmp_path):
    (tmp_path / "tokens").write_bytes(bytes(100 * MIB))
    beginning = baseline_memory(CPU)
    tokens = np.memmap(tmp_path / "tokens", np.uint8, "r")
    assert int(tokens[::4096].sum()) == 0
    assert abs(peak_memory(CPU) - beginning) < 20 * MIB
