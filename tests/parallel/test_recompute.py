"""Recomputation changes what is kept, and nothing else."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from grids import sampled
from held import held
from kumi.parallel import build, build_mesh
from kumi.parallel.mesh import RankInfo
from kumi.spec.layout import Layout
from kumi.spec.ledger import params
from kumi.spec.precision import PRECISIONS
from steps import SPECS, batch


def _forward_backward(how: str, family: str, kind: str = "fp32") -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes held after the forward pass, and the gradients."""
    mesh = build_mesh(Layout(recompute=how), RankInfo(0, 1, 0, torch.device("cpu")))
    model = build(SPECS[family], mesh, PRECISIONS[kind], weights=0)
    part = batch(0)
    with held() as found:
        summed, _ = model(**part, token_weights=torch.ones(part["labels"].shape))
    summed.backward()
    return found.bytes, {name: parameter.grad for name, parameter in model.named_parameters()}


# What a model keeps in half precision differs by its dtypes alone: one model shows it.
@pytest.mark.parametrize(
    ("kind", "family"), sampled(list(product(("fp32", "bf16"), SPECS)), lambda place: place <= len(SPECS))
)
def test_gradients_and_names_stay_and_memory_falls(family, kind):
    kept, grads = zip(*(_forward_backward(how, family, kind) for how in ("none", "selective", "full")))
    assert sorted(grads[0]) == sorted(param.name for param in params(SPECS[family]))
    for other in grads[1:]:
        assert list(other) == list(grads[0])
        assert all(torch.equal(other[name], grad) for name, grad in grads[0].items())
    assert kept[0] > kept[1] > kept[2]


def test_evaluation_does_not_recompute():
    mesh = build_mesh(Layout(recompute="full"), RankInfo(0, 1, 0, torch.device("cpu")))
    model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=0)
    with torch.no_grad():
        assert not model(batch(0)["input_ids"]).requires_grad


def test_only_the_first_layers_recompute():
    """Each further layer that does keeps less, and all of them as much as without a number."""
    counts = []
    for count in (0, 1, 2, None):
        mesh = build_mesh(Layout(recompute="full", recompute_layers=count), RankInfo(0, 1, 0, torch.device("cpu")))
        model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=0)
        counts.append(sum(len(layer.wrappers) for layer in model.model.layers.values()))
    assert counts == [0, 1, 2, len(SPECS["llama"].layers)]
