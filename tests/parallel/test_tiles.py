"""Tiled MLPs give the same results, and no rank has an unsharded matrix."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from grids import sampled
from kumi.nn.mlp import MLP
from kumi.parallel import build, clip_gradients, init_adamw, model_pieces, unwrap
from kumi.parallel.mlp_tiling import Tiling, _forward
from kumi.spec import model
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.legality import UNSUPPORTED, violations
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.techniques import technique_rules
from planned import job_of
from ranks import run_ranks
from steps import SPECS, forward_backward, mesh_of

LAYOUTS = [
    Layout(tiles=6),
    Layout(dp_replicate=2, tiles=3, recompute="full"),
    Layout(dp_shard=2, zero=1, tiles=2),
    Layout(dp_shard=2, zero=3, tiles=9),
    Layout(dp_shard=2, zero=3, tiles=3, recompute="full", offload="optimizer"),
    Layout(cp=2, zero=3, tiles=3),
    Layout(dp_replicate=2, dp_shard=2, zero=3, tiles=2),
    Layout(pp=2, dp_shard=2, zero=3, tiles=2),
]


def _trained(layout, microbatches):
    """Losses, norms, and this rank's parts of the parameters after two steps."""
    mesh = mesh_of(layout)
    made = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=3)
    optimizer = init_adamw(unwrap(made).named_parameters(), decayed_names(SPECS["llama"]), Optim(lr=1e-2))
    losses = []
    for step in range(2):
        losses.append(forward_backward(made, mesh, step, microbatches, dtype=torch.float64))
        losses.append(clip_gradients(made, 0.5, mesh).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [(one.name, one.start, one.data.numpy().copy()) for one in model_pieces(made, mesh)]


@cache
def alone():
    return run_ranks(1, _trained, Layout(), 1)[0]


@pytest.mark.parametrize("layout", sampled([(layout,) for layout in LAYOUTS], lambda place: place not in (1, 6)))
def test_layouts_with_tiles_train_as_one_process_without(ranks, layout):
    figures, whole = alone()
    tensors = {name: values for name, _, values in whole}
    for losses, parts in ranks(layout.world_size, _trained, layout, 2):
        assert losses == pytest.approx(figures, rel=1e-10)
        for name, start, values in parts:
            expected = tensors[name][tuple(slice(a, a + n) for a, n in zip(start, values.shape))]
            assert np.abs(values - expected).max() <= 1e-10 * np.abs(tensors[name]).max(), name


def _largest(layout):
    """Return the most elements of MLP matrices that a rank gathers in a step, and the elements of one matrix."""
    from kumi.parallel import mlp_tiling

    mesh = mesh_of(layout)
    made = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=3)
    seen = []
    gathered = mlp_tiling.all_gather_no_grad
    mlp_tiling.all_gather_no_grad = lambda part, group: seen.append(gathered(part, group)) or seen[-1]
    try:
        forward_backward(made, mesh, 0, 1)
    finally:
        mlp_tiling.all_gather_no_grad = gathered
    mlp = unwrap(made).model.layers["0"].mlp
    shard = sum(weight.numel() for weight in mlp.parameters())
    return max(one.numel() for one in seen), len(seen), shard


def test_a_rank_never_gathers_a_whole_matrix(ranks):
    spec = SPECS["llama"]
    whole = spec.hidden_size * spec.layers[0].mlp.intermediate_size
    for largest, count, shard in ranks(2, _largest, Layout(dp_shard=2, zero=3, tiles=9)):
        assert largest == whole // 9
        assert count == 2 * 3 * 9 * len(spec.layers)  # forward and backward
        assert shard == 3 * whole // 2


def _both(kind, **fields):
    """Return output and gradients of a layer with biases, untiled and tiled."""
    dtype, results = getattr(torch, kind), []
    for tiling in (None, Tiling(4, None, dtype)):
        torch.manual_seed(0)
        mlp = MLP(10, model.MLP(24, bias=True, **fields), device=None, dtype=torch.promote_types(dtype, torch.float32))
        for parameter in mlp.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(2, 5, 10, dtype=dtype, requires_grad=True)
        out = mlp(x) if tiling is None else _forward(tiling, mlp, x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(parameter.grad for parameter in mlp.parameters())])
    return results


@pytest.mark.parametrize(("kind", "tolerance"), [("float64", 1e-12), ("bfloat16", 3e-2)])
def test_a_layer_with_biases(kind, tolerance):
    for whole, tiled in zip(*_both(kind)):
        assert whole.dtype == tiled.dtype
        assert float((whole - tiled).double().norm() / whole.double().norm()) < tolerance


@pytest.mark.parametrize(
    "fields",
    [{"gated": False, "hidden_act": "gelu"}, {"gated": False, "hidden_act": "relu"}, {"hidden_act": "gelu_new"}],
)
def test_a_layer_with_another_activation(fields):
    for whole, tiled in zip(*_both("float64", **fields)):
        torch.testing.assert_close(tiled, whole)


def test_only_the_input_is_kept():
    mlp = MLP(8, model.MLP(4096), device=None, dtype=torch.float32)
    x, saved = torch.randn(64, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        _forward(Tiling(8, None, torch.float32), mlp, x)
    assert sum(saved) == x.numel() + sum(parameter.numel() for parameter in mlp.parameters())


def test_what_tiles_do_not_go_with_is_said():
    job: Job = job_of(SPECS["llama"])

    def message(**fields):
        return "; ".join(violations(technique_rules(job.model), replace(Layout(tiles=4), **fields), UNSUPPORTED))

    assert message() == ""
    assert message(tp=2) == "tiles=4 is not supported with tp=2; set tp = 1, or tiles = 1"
    assert "tiles=4 is not supported with recompute='selective'" in message(recompute="selective")
    assert "tiles=4 is not supported with schedule='zb-v'" in message(pp=2, schedule="zb-v", stages=2)
    assert message(dp_shard=2, zero=3).endswith(
        "intermediate_size=36 in each of 2 shards; set tiles to one of 1, 2, 3, 6, 9, 18"
    )
    assert "a number of shards that divides hidden_size=18" in message(dp_shard=4, zero=3)
    assert "dense feed-forward layers, but the model has none" in "; ".join(
        violations(technique_rules(SPECS["moe"]), Layout(tiles=4), UNSUPPORTED)
    )
