"""16-bit training in layouts beyond plain data parallelism, and one loss scale for all ranks."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from grids import sampled
from kumi.parallel import LossScale, build, clip_gradients, unwrap
from kumi.parallel.stage_modules import local_shard
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from ranks import run_ranks
from steps import SPECS, forward_backward, mesh_of, train

LAYOUTS = [
    Layout(dp_shard=2, zero=2),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=False),
    Layout(tp=2, dp_shard=2, zero=3),
    Layout(pp=2, dp_shard=2, zero=1),
]


@cache
def alone():
    return run_ranks(1, train, Layout(), "llama", 1, "fp32")[0]


# By default each layout in one of the two.
@pytest.mark.parametrize(
    ("layout", "kind"), sampled(list(product(LAYOUTS, ("bf16", "fp16"))), lambda place: place % 4 in (1, 2))
)
def test_half_precision_follows_float32(ranks, layout, kind):
    wide = alone()
    for trace in ranks(layout.world_size, train, layout, "llama", 2, kind):
        assert trace.losses == pytest.approx(wide.losses, rel=5e-3)
        assert trace.norms == pytest.approx(wide.norms, rel=5e-2)
        assert {part.values.dtype.name for part in trace.params} == {"float32"}


def _scales(layout):
    """The loss scale after a step that overflowed in one part of one matrix of the last rank, and after a good one."""
    mesh = mesh_of(layout)
    model, scales = build(SPECS["llama"], mesh, PRECISIONS["fp16"], weights=0), []
    scale = LossScale(1024.0, patience=1)
    for step in range(2):
        forward_backward(model, mesh, step, 2, scale=scale.scale)
        matrices = [value for name, value in unwrap(model).named_parameters() if "down_proj" in name]
        if step == 0 and mesh.rank == layout.world_size - 1:
            local_shard(matrices[-1].grad)[0, 0] = float("inf")
        scale = scale.after(clip_gradients(model, 1.0, mesh, loss_scale=scale.scale))
        scales.append(scale.scale)
        for parameter in model.parameters():
            parameter.grad = None
    return scales


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(tp=2, dp_shard=2, zero=1), Layout(cp=2, zero=3)])
def test_all_ranks_skip_the_step_that_one_of_them_overflowed_in(ranks, layout):
    assert ranks(layout.world_size, _scales, layout) == [[512.0, 1024.0]] * layout.world_size


def _master_dtypes(layout):
    mesh = mesh_of(layout)
    model = build(SPECS["llama"], mesh, PRECISIONS["fp16"], weights=0)
    forward_backward(model, mesh, 0, 2, scale=1024.0)
    return {(local_shard(one).dtype, local_shard(one.grad).dtype) for one in model.parameters()}


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp_shard=2, zero=1), Layout(dp_shard=2, zero=3)])
def test_gradients_add_up_in_float32(ranks, layout):
    assert ranks(2, _master_dtypes, layout) == [{(torch.float32, torch.float32)}] * 2
