"""The matmuls that float8 replaces, and errors where there are no kernels. The kernels themselves need a GPU."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from kumi.errors import LayoutError
from kumi.nn.decoder import Decoder
from kumi.parallel import float8
from kumi.parallel.float8 import swap_matmuls, use_float8
from kumi.spec.cluster import Device
from kumi.spec.layout import Layout
from kumi.spec.legality import UNSUPPORTED, violations
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.precision import PRECISIONS
from kumi.spec.techniques import float8_rules
from kumi.train import start
from planned import job_of

# The second layer's feed-forward width is no multiple of 16.
LAYERS = tuple(LayerSpec(Attention(2, 1, 16, Rope(10000.0)), MLP(width)) for width in (48, 40))
SPEC = ModelSpec("llama", 64, 32, LAYERS, 1e-5, 128)


class Recorded(nn.Linear):
    """A linear layer that rounds its input to bfloat16, and records its calls."""

    calls: ClassVar[list[tuple[int, int]]] = []

    def forward(self, x):
        self.calls.append(tuple(self.weight.shape))
        return nn.functional.linear(x.bfloat16().to(x.dtype), self.weight)


def _convert(holder, config):
    assert config == "a scale for each rowwise"
    plain = holder[0]
    holder[0] = Recorded(plain.in_features, plain.out_features, bias=False, device="meta")


@pytest.fixture
def torchao(monkeypatch):
    """A stand-in for the package, with what is used of it."""
    package, inner = ModuleType("torchao"), ModuleType("torchao.float8")
    inner.convert_to_float8_training = _convert
    recipes = {"from_recipe_name": staticmethod(lambda name: f"a scale for each {name}")}
    inner.Float8LinearConfig = type("Float8LinearConfig", (), recipes)
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", inner)
    monkeypatch.setattr(Recorded, "calls", [])


def test_the_layers_matrices_are_swapped_and_nothing_else(torchao):
    decoder = Decoder(SPEC)
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.1)
    names = [name for name, _ in decoder.named_parameters()]
    ids = torch.randint(0, 64, (2, 16))
    expected = decoder(ids)
    swapped = swap_matmuls(decoder, rowwise=True)
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    first = [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert swapped == [
        f"model.layers.{layer}.{name}" for layer, these in enumerate((first, attention)) for name in these
    ]
    assert [name for name, _ in decoder.named_parameters()] == names
    out = decoder(ids)
    assert len(Recorded.calls) == len(swapped)
    assert not torch.equal(out, expected)
    assert torch.allclose(out, expected, rtol=5e-2, atol=5e-2)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_what_has_no_float8_is_refused():
    with pytest.raises(LayoutError, match=r"cpu has no float8 matmuls, .*set precision.kind = 'bf16'"):
        use_float8(Decoder(SPEC, device="meta"), torch.device("cpu"))
    if importlib.util.find_spec("torchao") is None:
        with pytest.raises(LayoutError, match="needs the package torchao, which is not installed"):
            swap_matmuls(Decoder(SPEC, device="meta"), rowwise=True)


@pytest.mark.parametrize(("capability", "rowwise"), [((8, 9), False), ((9, 0), True), ((10, 0), True)])
def test_gpus_that_can_have_a_scale_for_each_row(monkeypatch, capability, rowwise):
    chosen = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(float8, "swap_matmuls", lambda decoder, rowwise: chosen.append(rowwise))
    use_float8(Decoder(SPEC, device="meta"), torch.device("cuda", 0))
    assert chosen == [rowwise]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(LayoutError, match="has no float8 matmuls"):
        use_float8(Decoder(SPEC, device="meta"), torch.device("cuda", 0))


def test_layers_that_are_not_compiled_are_refused():
    run = SimpleNamespace(layout=Layout(), precision=PRECISIONS["fp8"], model=SPEC, compiles=False)
    with pytest.raises(LayoutError, match=r"slower than bf16 with train\.compile=false, .*set train\.compile=true"):
        start._check_compiled(run)
    run.compiles = True
    start._check_compiled(run)


def refused(job, **fields):
    return violations(float8_rules(job), Layout(**fields), UNSUPPORTED)


def test_what_goes_with_float8_is_said():
    able = Device("GPU", "cuda", 80 * 2**30, ("float32", "bfloat16", "float8"))
    job = job_of(SPEC, seq_len=128, kind="fp8", device=able)
    assert refused(job) == []
    (message,) = refused(replace(job, cluster=replace(job.cluster, device=Device("", "cpu", 0))))
    assert "needs a CUDA device that is described with float8 matmuls, but the device is unnamed" in message
    assert "is not supported with tp=2; set tp = 1" in refused(job, tp=2)[0]
    odd = job_of(SPEC, seq_len=8, kind="fp8", device=able)
    assert "but there are 8; change batch.seq_len" in refused(odd)[0]
    assert refused(job_of(SPEC, kind="bf16"), tp=2) == []
