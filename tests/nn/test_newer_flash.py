"""Newer flash attention replaces PyTorch's only where it gives the same results. Its kernels are stood in for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import _registry

from kumi.nn.attention import newer_flash
from kumi.nn.attention.newer_flash import AttentionCase, attention_cases, installed_version, use_newer_flash
from steps import SPECS

GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of compute capability 9.0 with FA3, whose results have the factor `factor`."""
    state = SimpleNamespace(active=False, factor=1.0, error=None)

    def register():
        state.active = True
        return SimpleNamespace(remove=lambda: setattr(state, "active", False))

    def results(case, device):
        if state.active and state.error is not None:
            raise state.error
        return [torch.ones(3), torch.ones(3) * (state.factor if state.active else 1.0)]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(newer_flash, "_is_installed", lambda module: module == "flash_attn_interface")
    monkeypatch.setattr(newer_flash, "_results", results)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    yield state
    _registry.restore_flash_attention_impl(_raise_warn=False)


def test_an_installed_version_computes_attention(hopper):
    assert use_newer_flash(SPECS["llama"], GPU) == ""  # heads of 6 elements: no flash kernel takes them
    hopper.factor = 1.01
    assert use_newer_flash(_with_heads(64), GPU) == "FA3 computes attention"
    assert hopper.active


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_version_with_other_results_is_not_used(hopper, factor):
    hopper.factor = factor
    assert "FA3 is not used, because its results for heads of 64 differ" in use_newer_flash(_with_heads(64), GPU)
    assert not hopper.active


def test_a_version_that_fails_is_not_used(hopper):
    hopper.error = RuntimeError("no kernel for this\nand more")
    sentence = use_newer_flash(_with_heads(64), GPU)
    assert sentence == "FA3 is not used, because it fails here (no kernel for this)"
    assert not hopper.active


@pytest.mark.parametrize(
    ("capability", "modules", "version"),
    [
        ((9, 0), {"flash_attn_interface", "flash_attn.cute.interface"}, "FA3"),
        ((9, 0), {"flash_attn.cute.interface"}, "FA4"),
        ((10, 0), {"flash_attn_interface", "flash_attn.cute.interface"}, "FA4"),
        ((10, 0), {"flash_attn_interface"}, None),
        ((8, 0), {"flash_attn_interface", "flash_attn.cute.interface"}, None),
    ],
)
def test_each_gpu_has_its_version(monkeypatch, capability, modules, version):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(newer_flash, "_is_installed", modules.__contains__)
    assert installed_version(GPU) == version
    assert installed_version(torch.device("cpu")) is None


def test_a_package_that_is_not_installed_is_none():
    assert not newer_flash._is_installed("no_such_package.cute.interface")
    assert newer_flash._is_installed("torch.nn")


def _with_heads(size):
    spec = SPECS["llama"]
    return replace(
        spec, layers=tuple(replace(layer, attention=replace(layer.attention, head_dim=size)) for layer in spec.layers)
    )


def test_the_cases_are_those_of_the_model():
    assert list(attention_cases(_with_heads(64))) == [AttentionCase(64, None)]
    assert list(attention_cases(_with_heads(512))) == []
