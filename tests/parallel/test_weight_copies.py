"""Copies of weights in the compute dtype change no bit of a training, and are made where FSDP gathers none."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kumi.nn.linear import linears
from kumi.parallel import build, build_mesh, build_optimizer, clip_gradients, pipeline
from kumi.parallel.mesh import RankInfo
from kumi.parallel.weight_copies import add_weight_copies, refresh_weight_copies, uses_weight_copies
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.validation.numbers_part import near
from kumi.validation.tiny_steps import TinyCase, tiny_steps
from steps import SPECS, batch

CPU = RankInfo(0, 1, 0, torch.device("cpu"))


def _train(family, layout, *, copies, refresh=True):
    """Return the losses of three steps of two microbatches, and the weights after them."""
    mesh = build_mesh(layout, CPU)
    model = build(SPECS[family], mesh, PRECISIONS["bf16"], weights=0)
    if copies:
        add_weight_copies(model, PRECISIONS["bf16"])
        copied = [layer for layer in linears(model) if layer.weight_copy is not None]
        assert bool(copied) == (layout.recompute_layers != len(SPECS[family].layers))
    optimizer, losses = build_optimizer(model, mesh, Optim(lr=0.01)), []
    inputs = [{**batch(number), "token_weights": torch.full(batch(0)["labels"].shape, -0.01)} for number in range(2)]
    for _ in range(3):
        losses.append(pipeline.train_microbatches(model, mesh, inputs).item())
        clip_gradients(model, 1.0, mesh)
        optimizer.step()
        if refresh:
            refresh_weight_copies(model)
        optimizer.zero_grad()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", Layout()),
        ("moe", Layout()),
        ("llama", Layout(recompute="full", recompute_layers=3)),
        ("llama", Layout(recompute="full", recompute_layers=1)),
        ("llama", Layout(schedule="zb-h1")),
    ],
    ids=str,
)
def test_a_training_with_copies_has_the_same_bits(family, layout):
    (losses, weights), (expected, expected_weights) = (_train(family, layout, copies=each) for each in (True, False))
    assert losses == expected
    assert losses[0] != losses[2]
    assert all(map(torch.equal, weights, expected_weights))


def test_copies_that_are_not_refreshed_are_old_weights():
    assert _train("llama", Layout(), copies=True, refresh=False)[0] != _train("llama", Layout(), copies=False)[0]


def test_the_validation_trains_with_copies_as_without():
    case = TinyCase(Layout(), precision="bf16")
    plain = tiny_steps(case, build_mesh(case.layout, CPU))
    with mock.patch("kumi.parallel.build.uses_weight_copies", return_value=True):
        assert tiny_steps(case, build_mesh(case.layout, CPU)) == plain
        with mock.patch("kumi.validation.tiny_steps.refresh_weight_copies"):
            assert not near(tiny_steps(case, build_mesh(case.layout, CPU)), plain, "bf16")


@pytest.mark.parametrize(
    ("kind", "layout", "device", "expected"),
    [
        ("bf16", Layout(), "cuda", True),
        ("bf16", Layout(), "cpu", False),
        ("fp32", Layout(), "cuda", False),
        ("bf16-pure", Layout(), "cuda", False),
        ("bf16", Layout(offload="states"), "cuda", False),
        ("bf16", Layout(tiles=2), "cuda", False),
    ],
)
def test_where_copies_are(kind, layout, device, expected):
    mesh = replace(build_mesh(layout, CPU), rank_info=replace(CPU, device=torch.device(device)))
    assert uses_weight_copies(mesh, PRECISIONS[kind]) == expected
