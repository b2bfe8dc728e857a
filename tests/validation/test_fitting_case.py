"""Sizes of steps by the free memory of a card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kumi.errors import ConfigError
from kumi.validation import random_run
from kumi.validation.fitting_case import StepCase, estimated_bytes, fitted
from kumi.validation.model_shapes import LLAMA_1B, LLAMA_8B, QWEN_30B_A3B

GIB = 2**30
CASES = {"1b": StepCase(LLAMA_1B), "8b": StepCase(LLAMA_8B, layers=8), "experts": StepCase(QWEN_30B_A3B, layers=4)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("card", [16, 24, 80])
def test_every_shape_fits_every_card(name, card):
    room = 0.8 * card * GIB
    case = fitted(CASES[name], room)
    assert case is not None
    assert estimated_bytes(case) <= room
    assert case.layers is None or case.layers >= 1
    assert {key: value for key, value in case.config.items() if key != "vocab_size"} == {
        key: value for key, value in CASES[name].config.items() if key != "vocab_size"
    }
    # One layer more would not fit, unless the case asked for no more.
    asked = CASES[name].model["num_hidden_layers"]
    if case.model["num_hidden_layers"] < asked:
        assert estimated_bytes(replace(case, layers=case.model["num_hidden_layers"] + 1)) > room


def test_a_large_card_takes_the_case_as_it_is():
    assert fitted(CASES["8b"], 1000 * GIB) == CASES["8b"]


def test_a_gpu_that_the_driver_does_not_list_is_as_pytorch_sees_it(monkeypatch):
    """A GPU of AMD, or a partition: the run that is measured has its memory, and no figures of a data sheet."""

    def unlisted(section):
        raise ConfigError("not listed")

    card = SimpleNamespace(name="AMD Instinct MI300X", total_memory=192 * GIB)
    monkeypatch.setattr(random_run, "cluster_spec", unlisted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    random_run.this_cluster.cache_clear()
    try:
        device = random_run.this_cluster().device
        assert (device.name, device.is_gpu, device.memory) == ("AMD Instinct MI300X", True, 192 * GIB)
        assert estimated_bytes(CASES["8b"]) < 192 * GIB
    finally:
        random_run.this_cluster.cache_clear()


def test_nothing_fits_no_memory():
    assert fitted(CASES["8b"], GIB / 100) is None
