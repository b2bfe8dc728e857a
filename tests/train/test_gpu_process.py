"""What a rank with a GPU sets for its process."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from kumi.train import gpu_process, process_memory
from kumi.train.gpu_process import COLLECT_EVERY, collect_if_due, collect_together, record_collectives

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self):
        self.itself = self


def test_garbage_is_collected_at_intervals_and_the_collector_returns():
    assert gc.isenabled()
    with collect_together(GPU):
        assert not gc.isenabled()
        garbage = weakref.ref(Cycle())
        collect_if_due(COLLECT_EVERY + 1)
        assert garbage() is not None
        collect_if_due(2 * COLLECT_EVERY)
        assert garbage() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_cpu_collects_as_usual():
    with collect_together(CPU):
        assert gc.isenabled()


def test_the_record_of_collectives_is_in_the_run_folder(tmp_path):
    environ = {"TORCH_FR_BUFFER_SIZE": "7"}
    record_collectives(tmp_path, environ)
    assert environ["TORCH_FR_BUFFER_SIZE"] == "7", "what the user has set stays"
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight_recorder_")


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest")])
def test_float32_products_are_in_tf32_only_where_asked(monkeypatch, tf32, precision):
    chosen = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    gpu_process.use_matmul_precision(CPU, tf32=tf32)
    gpu_process.use_matmul_precision(GPU, tf32=tf32)
    assert chosen == [precision]


def test_reserved_and_free_memory_of_a_gpu_are_metrics(monkeypatch):
    stand_in = SimpleNamespace(mem_get_info=lambda device: (10, 80), max_memory_reserved=lambda device: 60)
    monkeypatch.setattr(torch, "cuda", stand_in)
    assert process_memory.held_memory(GPU) == {"reserved": 60, "free": 10}
    assert process_memory.held_memory(CPU) == {}
