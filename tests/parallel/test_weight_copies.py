"""Copies of weights in the compute dtype change no bit of a training, and are made where FSDP gathers none."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from kumi.nn.linear import linears
from kumi.parallel import build, build_mesh, build_optimizer, clip_gradients, pipeline
from kumi.parallel.mesh import RankInfo
from kumi.parallel.optim import OPTIMIZERS
from kumi.parallel.state_tensors import model_pieces
from kumi.parallel.weight_copies import WeightCopies, add_weight_copies, uses_weight_copies
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.validation.tiny_steps import TinyCase, tiny_steps
from steps import SPECS, batch

CPU = RankInfo(0, 1, 0, torch.device("cpu"))
OPTIM = Optim(lr=0.01)


def _train(family, layout, *, copies, optim=OPTIM):
    """Return the losses of three steps of two microbatches, and the weights after them."""
    mesh = build_mesh(layout, CPU)
    model = build(SPECS[family], mesh, PRECISIONS["bf16"], weights=0)
    if copies:
        add_weight_copies(model, PRECISIONS["bf16"])
        copied = [layer for layer in linears(model) if layer.weight_copy is not None]
        assert bool(copied) == (layout.recompute_layers != len(SPECS[family].layers))
    optimizer, losses = build_optimizer(model, mesh, optim), []
    inputs = [{**batch(number), "token_weights": torch.full(batch(0)["labels"].shape, -0.01)} for number in range(2)]
    for _ in range(3):
        losses.append(pipeline.train_microbatches(model, mesh, inputs).item())
        clip_gradients(model, 1.0, mesh)
        optimizer.step()
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_s_update_is_seen(kind):
    optim = Optim(kind=kind, lr=0.01)
    losses = [_train("llama", Layout(), copies=copies, optim=optim)[0] for copies in (True, False)]
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][2]


def test_copies_follow_values_that_are_loaded():
    model = build(SPECS["llama"], build_mesh(Layout(), CPU), PRECISIONS["bf16"], weights=0)
    inputs = {key: value for key, value in batch(0).items() if key != "labels"}
    with torch.no_grad():
        add_weight_copies(model, PRECISIONS["bf16"])
        before = model(**inputs)
        for piece in model_pieces(model, build_mesh(Layout(), CPU)):
            piece.data.mul_(1.5)
        changed = model(**inputs)
        for layer in linears(model):
            layer.weight_copy = None
        assert torch.equal(changed, model(**inputs))
    assert not torch.equal(changed, before)


def test_old_copies_would_be_noticed():
    """The comparison above sees copies of an earlier step."""
    with mock.patch.object(WeightCopies, "__call__", return_value=None):
        stale = _train("llama", Layout(), copies=True)[0]
    assert stale != _train("llama", Layout(), copies=False)[0]


def test_the_validation_trains_with_copies_as_without():
    case = TinyCase(Layout(), precision="bf16")
    plain = tiny_steps(case, build_mesh(case.layout, CPU))
    with mock.patch("kumi.parallel.build.uses_weight_copies", return_value=True):
        assert tiny_steps(case, build_mesh(case.layout, CPU)) == plain


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
