"""The global gradient norm, clipping, and the loss scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kumi.parallel import LossScale, build, clip_gradients, model_pieces, unwrap
from kumi.parallel.mesh import RankInfo, build_mesh
from kumi.parallel.stage_modules import local_shard
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from steps import SPECS, forward_backward, mesh_of

ALONE = build_mesh(Layout(), RankInfo(0, 1, 0, torch.device("cpu")))


def _with_grads(*values: list[float]) -> nn.ParameterList:
    parameters = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for parameter, value in zip(parameters, values):
        parameter.grad = torch.tensor(value)
    return nn.ParameterList(parameters)


def test_norm_is_returned_and_gradients_are_scaled_to_the_bound():
    parameters = _with_grads([3.0], [0.0, 4.0])
    assert clip_gradients(parameters, 1.0, ALONE).item() == pytest.approx(5.0)
    assert parameters[1].grad[1].item() == pytest.approx(0.8, rel=1e-6)


@pytest.mark.parametrize("bound", [None, 0.0, 6.0])
def test_gradients_within_the_bound_stay_bitwise(bound):
    parameters = _with_grads([3.0], [0.0, 4.0])
    assert clip_gradients(parameters, bound, ALONE).item() == 5.0
    assert [parameter.grad.tolist() for parameter in parameters] == [[3.0], [0.0, 4.0]]


def test_loss_scale_is_divided_out_before_clipping():
    parameters = _with_grads([24.0], [0.0, 32.0])
    assert clip_gradients(parameters, 2.5, ALONE, loss_scale=8.0).item() == pytest.approx(5.0)
    assert parameters[0].grad.item() == pytest.approx(1.5, rel=1e-6)


def test_large_half_precision_gradients_are_added_up_in_float32():
    parameters = [nn.Parameter(torch.zeros(4, dtype=torch.float16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((4,), 60000.0, dtype=torch.float16)
    norm = clip_gradients(nn.ParameterList(parameters), None, ALONE)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(8) * 60000.0)


def _one_rank_overflows(layout):
    mesh = mesh_of(layout)
    model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=0)
    forward_backward(model, mesh, 0, 1)
    if mesh.rank == 1:
        local_shard(unwrap(model).model.layers["0"].mlp.up_proj.weight.grad)[0, 0] = float("inf")
    if layout.zero == 0:  # unsharded gradients are equal on all ranks: they overflow on all or on none
        local_shard(unwrap(model).model.layers["0"].mlp.up_proj.weight.grad)[0, 0] = float("inf")
    norm = clip_gradients(model, 1.0, mesh)
    return LossScale(1024.0).after(norm).scale


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2, zero=2)])
def test_ranks_agree_on_an_overflow(ranks, layout):
    assert ranks(2, _one_rank_overflows, layout) == [512.0, 512.0]


def test_loss_scale_grows_after_patient_steps():
    scale, good = LossScale(8.0, patience=2), torch.tensor(1.0)
    assert [scale.after(good).scale, scale.after(good).after(good).scale] == [8.0, 16.0]
    assert scale.after(good).after(torch.tensor(math.nan)) == LossScale(4.0, patience=2, skipped=1, in_a_row=1)
    assert LossScale(1.0).after(torch.tensor(math.inf)).scale == 1.0


def _ddp_copies_nothing():
    mesh = mesh_of(Layout(dp_replicate=2))
    model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=0)
    forward_backward(model, mesh, 0, 3)
    first = [parameter.grad.data_ptr() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    forward_backward(model, mesh, 1, 3)
    return first, [parameter.grad.data_ptr() for parameter in model.parameters()], len(model_pieces(model, mesh))


def test_plain_data_parallel_gradients_are_its_buckets(ranks):
    for _, second, pieces in ranks(2, _ddp_copies_nothing):
        assert len(set(second)) == len(second) == pieces
