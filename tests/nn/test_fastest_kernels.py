"""Kernels are used only if they are right and faster; each other one gives a sentence."""

from __future__ import annotations

import time
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kumi import accelerator
from kumi.compat import has_varlen
from kumi.errors import ConfigError
from kumi.nn import fastest_kernels, numerics
from kumi.nn.fastest_kernels import Sizes, measure_kernels
from kumi.nn.numerics import kernel, load_kernel, use_kernels
from kumi.spec.numerics import KERNELS
from triton_process import interpreted

CPU = torch.device("cpu")
TINY = Sizes(4, 8, 20, 4, 2, 2, 8, 4, 8, torch.float32)


@pytest.fixture
def measured(monkeypatch):
    """A function that measures one operation, whose kernel is a given function; PyTorch's takes 4 ms and returns 1."""
    monkeypatch.setattr(fastest_kernels, "KERNELS", {"loss": KERNELS["loss"]})
    monkeypatch.setattr(fastest_kernels, "find_spec", lambda name: name)

    def operation():
        if kernel("loss") is None:
            time.sleep(0.004)
            return [torch.ones(3)]
        return [kernel("loss").run()]

    monkeypatch.setattr(fastest_kernels, "_operations", lambda device, sizes: {"loss": operation})

    def measure(run, seconds=60.0):
        monkeypatch.setattr(numerics, "load_kernel", lambda operation, implementation: SimpleNamespace(run=run))
        choice = measure_kernels(CPU, seconds=seconds)
        assert kernel("loss") is None
        return choice.numerics.kernels, choice.seconds["loss"].keys(), " ".join(choice.notes)

    return measure


def test_right_and_faster(measured):
    assert measured(lambda: torch.ones(3)) == ((("loss", "triton"),), {"torch", "triton"}, "")


def slow():
    time.sleep(0.02)
    return torch.ones(3)


def broken():
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (slow, "loss:triton takes "),
        (broken, "loss:triton fails (RuntimeError: no kernel image is available for execution on the device), and"),
        (lambda: torch.tensor([1.0, 1.0, 1.1]), "loss:triton differs from PyTorch's operations by 0.058 of the result"),
        (lambda: torch.tensor([1.0, 1.0, torch.nan]), "loss:triton differs from PyTorch's operations by nan"),
        (lambda: torch.ones(2), "loss:triton fails (RuntimeError"),
    ],
)
def test_not_used_and_the_reason(measured, run, reason):
    kernels, _, note = measured(run)
    assert kernels == ()
    assert note.startswith(reason)
    assert "not used" in note


def test_a_measurement_without_time_uses_nothing(measured):
    kernels, measurements, note = measured(lambda: torch.ones(3), seconds=0.0)
    assert (kernels, measurements) == ((), {"torch"})
    assert note == "loss:triton was not measured within 0 s, and is not used"


@pytest.fixture
def attention(monkeypatch):
    """A function that measures kinds of attention, by what PyTorch's flash kernel and FA3 do; masks take 4 ms."""
    active = []
    monkeypatch.setattr(fastest_kernels, "can", lambda device, capability: True)
    monkeypatch.setattr(fastest_kernels, "installed_version", lambda device: "FA3")
    monkeypatch.setattr(fastest_kernels, "activate_flash", active.append)
    monkeypatch.setattr(fastest_kernels, "restore_flash", active.clear)

    def measure(flash, newer):
        def operation():
            if "packed flash attention" in accelerator._refused:
                return [torch.ones(3)]
            return [newer() if active else flash()]

        monkeypatch.setattr(fastest_kernels, "_attention", lambda device, sizes: operation)
        kind, seconds, notes = fastest_kernels.measure_attention(CPU, TINY, time.perf_counter() + 60)
        assert not active
        assert not accelerator._refused
        return kind, seconds.keys(), " ".join(notes)

    return measure


def after(seconds, value=1.0):
    def run():
        time.sleep(seconds)
        return torch.full((3,), value)

    return run


@pytest.mark.parametrize(
    ("flash", "newer", "kind", "note"),
    [
        (after(0.004), after(0.0), "fa3", ""),
        (after(0.0), after(0.004), None, "attention:fa3 takes "),
        (after(0.004), after(0.0, 2.0), None, "attention:fa3 differs from PyTorch's operations by 1 of"),
        (after(0.004), broken, None, "attention:fa3 fails (RuntimeError: no kernel image"),
        (broken, after(0.0), "masked", "PyTorch's flash attention fails (RuntimeError: no kernel image"),
        (
            after(0.0, float("nan")),
            after(0.0),
            "masked",
            "PyTorch's flash attention differs from attention with masks by",
        ),
    ],
)
def test_the_kind_of_attention(attention, flash, newer, kind, note):
    measured_kind, _, notes = attention(flash, newer)
    assert measured_kind == kind
    assert notes.startswith(note)
    assert bool(notes) == bool(note)


def test_attention_by_flash_and_by_masks_is_near_on_this_device():
    function = fastest_kernels._attention(CPU, TINY)
    assert fastest_kernels.distance(function(), function()) == 0


def test_masks_are_used_where_flash_is_wrong(monkeypatch):
    monkeypatch.setattr(accelerator, "is_gpu", lambda device: True)
    monkeypatch.setattr(accelerator, "_compute_capability", lambda device: (9, 0))
    q = torch.zeros(1, dtype=torch.bfloat16)
    assert has_varlen(q)
    use_kernels((("attention", "masked"), ("compile", "off")))
    assert not has_varlen(q)
    use_kernels(())
    assert has_varlen(q)


def test_every_kernel_has_a_module():
    assert set(numerics._MODULES) == {(name, each) for name, all_of in KERNELS.items() for each in all_of}
    assert all(find_spec(module) for module in numerics._MODULES.values())


def test_a_kernel_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(numerics._MODULES, ("scan", "mamba-ssm"), "kumi.nn.kernels.missing")
    with pytest.raises(ConfigError, match=r"scan:mamba-ssm cannot be imported .* install mamba-ssm, .* = 'torch'"):
        load_kernel("scan", "mamba-ssm")


@interpreted
def test_all_kernels_are_right_here():
    """Interpreted kernels are equal and slow. The package mamba-ssm is not measured if it is not installed."""
    choice = measure_kernels(CPU, TINY, seconds=600.0)
    assert choice.numerics.kernels == ()
    assert set(choice.seconds) == set(KERNELS)
    assert all(times["triton"] > times["torch"] for times in choice.seconds.values())
    assert all("takes" in note for note in choice.notes), choice.notes
    use_kernels(())
