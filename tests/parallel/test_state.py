"""The model's and the optimizer's tensors as pieces of global ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grids import sampled
from kumi.nn.router import routers
from kumi.parallel import build, fill_pieces, init_adamw, model_pieces, optimizer_pieces, owned_pieces, unwrap
from kumi.spec.layout import Layout
from kumi.spec.ledger import buffers, decayed_names, params, tensors
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from steps import SPECS, forward_backward, mesh_of

LAYOUTS = [
    ("qwen", Layout()),
    ("qwen", Layout(dp_replicate=4)),
    ("qwen", Layout(dp_shard=4, zero=1)),
    ("qwen", Layout(dp_shard=4, zero=3)),
    ("qwen", Layout(dp_replicate=2, dp_shard=2, zero=2)),
    ("qwen", Layout(tp=4)),
    ("qwen", Layout(tp=2, cp=2, zero=3)),
    ("deep-tied", Layout(pp=2, dp_shard=2, zero=1)),
    ("deep-tied", Layout(pp=2, tp=2, schedule="zb-v", stages=2)),
    ("latent", Layout(dp_shard=2, tp=2, zero=3, ep=2, expert_tp=2)),
    ("moe", Layout(pp=2, dp_shard=2, zero=1, ep=2)),
]
# Layouts that load them: one of each kind.
OTHERS = {
    "qwen": (Layout(), Layout(dp_shard=2, zero=2), Layout(tp=2, sequence_parallel=False)),
    "deep-tied": (Layout(), Layout(tp=2, pp=2, schedule="interleaved", stages=2), Layout(dp_shard=2, zero=3)),
    "latent": (Layout(), Layout(pp=2, tp=2, ep=2)),
    "moe": (Layout(), Layout(dp_shard=2, tp=2, zero=3, ep=1, expert_tp=2)),
}


def _saved(layout, family="qwen", steps=1):
    """Return the pieces that this rank saves after `steps` steps: (name, shape, start, values)."""
    mesh = mesh_of(layout)
    model = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=3)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(SPECS[family]), Optim())
    for step in range(steps):
        forward_backward(model, mesh, step, 1, dtype=torch.float64)
        optimizer.step()
    pieces = owned_pieces([*model_pieces(model, mesh), *optimizer_pieces(model, optimizer, mesh)], model, mesh, Optim())
    return [(piece.name, piece.shape, piece.start, piece.data.numpy().copy()) for piece in pieces]


def _gather(parts):
    """Return the global tensors, after checking that each element is written once."""
    whole, written = {}, {}
    for name, shape, start, values in (piece for part in parts for piece in part):
        where = tuple(slice(first, first + size) for first, size in zip(start, values.shape))
        whole.setdefault(name, np.full(shape, np.nan))[where] = values
        written.setdefault(name, np.zeros(shape, dtype=int))[where] += 1
    assert all((count == 1).all() for count in written.values())
    return whole


def _loaded(layout, family, whole):
    """Build a model from the global tensors, and return the pieces that this rank saves."""
    mesh = mesh_of(layout)

    def read(name, start, shape):
        where = tuple(slice(first, first + size) for first, size in zip(start, shape))
        return torch.from_numpy(np.asarray(whole[name][where]))

    model = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=read)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(SPECS[family]), Optim())
    fill_pieces(optimizer_pieces(model, optimizer, mesh), read)
    pieces = owned_pieces([*model_pieces(model, mesh), *optimizer_pieces(model, optimizer, mesh)], model, mesh, Optim())
    return [(piece.name, piece.shape, piece.start, piece.data.numpy().copy()) for piece in pieces]


@pytest.mark.parametrize(("family", "layout"), sampled(LAYOUTS, lambda place: place not in (2, 7)))
def test_every_element_is_saved_once_and_any_layout_reads_it(ranks, family, layout):
    parts = ranks(layout.world_size, _saved, layout, family)
    whole = _gather(parts)
    names = [param.name for param in params(SPECS[family])]
    states = [f"optim/{name}/{state}" for name in names for state in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(whole) == sorted([*(f"model/{tensor.name}" for tensor in tensors(SPECS[family])), *states])
    assert all(whole[f"optim/{name}/step"] == 1.0 for name in names)
    for other in OTHERS[family]:
        again = _gather(ranks(other.world_size, _loaded, other, family, whole))
        assert all(np.array_equal(again[name], values) for name, values in whole.items())


def test_replicated_tensors_are_shared_out_by_bytes(ranks):
    for layout in (Layout(dp_replicate=4), Layout(dp_replicate=2, dp_shard=2, zero=1)):
        sizes = [sum(piece[3].nbytes for piece in part) for part in ranks(4, _saved, layout, "qwen", 0)]
        largest = max(param.numel for param in params(SPECS["qwen"])) * 8
        assert max(sizes) - min(sizes) <= largest


# Sharded by rows or by columns, by experts, by layers, and not at all; the other layouts combine these.
@pytest.mark.parametrize(("family", "layout"), sampled(LAYOUTS, lambda place: place in (1, 3, 5, 8, 9)))
def test_start_weights_do_not_depend_on_the_layout(ranks, family, layout):
    whole = _gather(ranks(layout.world_size, _saved, layout, family, 0))
    alone = _gather(ranks(1, _saved, Layout(), family, 0))
    assert all(np.array_equal(whole[name], values) for name, values in alone.items())


def _saved_model(layout):
    """Return the pieces that this rank saves of a model with routing biases, after these have changed."""
    mesh = mesh_of(layout)
    model = build(SPECS["latent"], mesh, PRECISIONS["bf16"], weights=3)
    for _, router in routers(model):
        router.update_bias(torch.arange(8), 0.5)
    pieces = owned_pieces(model_pieces(model, mesh), model, mesh)
    return [(piece.name, piece.shape, piece.start, piece.data.numpy().copy()) for piece in pieces]


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2, zero=3), Layout(dp_shard=2, zero=1, ep=2), Layout(pp=2), Layout(dp_replicate=2)]
)
def test_biases_that_choose_experts_are_saved_once_and_whole(ranks, layout):
    whole = _gather(ranks(layout.world_size, _saved_model, layout))
    assert whole.keys() == {f"model/{tensor.name}" for tensor in tensors(SPECS["latent"])}
    for bias in buffers(SPECS["latent"]):
        assert whole[f"model/{bias.name}"].tolist() == [0.5] * 4 + [-0.5] * 4
