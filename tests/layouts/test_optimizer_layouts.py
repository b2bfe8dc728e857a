"""Every optimizer trains in every layout as in one process, has the planned bytes, and resumes in another layout.

In float64, so that only states in fewer bits differ by more than rounding: Adafactor's means and the scales of 8-bit
moments are float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from test_layouts import TOLERANCE, close, updates_apart

from grids import named, sampled
from kumi.parallel import (
    build,
    build_optimizer,
    clip_gradients,
    fill_pieces,
    model_pieces,
    optimizer_pieces,
    owned_pieces,
)
from kumi.parallel.stage_modules import local_shard, params_by_name
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.optim_states import is_muon_matrix
from kumi.spec.precision import PRECISIONS
from kumi.spec.saved_tensors import optimizer_shapes
from kumi.spec.sharding import state_bytes
from ranks import run_ranks
from steps import VOCAB, Part, forward_backward, gradients, mesh_of

LR = 1e-2
KINDS = ("sgd", "muon", "adafactor", "adamw-8bit")
# Float32 states are rounded, sometimes to another neighbour: the relative change of an update.
FLOAT32 = 64 * 2.0**-24
APART = {"sgd": 0.0, "muon": 0.0, "adafactor": FLOAT32 * LR, "adamw-8bit": FLOAT32 * LR}

# Rows of 288 elements are a block of 256 and one of 32, which tp cuts elsewhere; 4 ranks share 2 key-value heads.
_ATTENTION = Attention(4, 2, 24, Rope(10000.0), qkv_bias=True, qk_norm=True)
SPECS = {
    "dense": ModelSpec("llama", VOCAB, 48, (LayerSpec(_ATTENTION, MLP(288)),) * 2, 1e-5, 128, tie_word_embeddings=True),
    "experts": ModelSpec("llama", VOCAB, 48, (LayerSpec(_ATTENTION, MoE(4, 2, 40, bias=True)),) * 2, 1e-5, 128),
}


def optim_of(kind: str) -> Optim:
    return Optim(kind=kind, lr=LR, betas=(0.9, 0.95))


@dataclass(frozen=True)
class Run:
    """The results of a rank: losses, gradients of every step, the pieces that it saves at the end, bytes of states."""

    losses: list[float]
    grads: list[list[Part]]
    saved: list[tuple[str, tuple[int, ...], Part]]
    before: list[tuple[str, tuple[int, ...], Part]]  # as they would have been saved before the last step
    state_bytes: int


def train(layout: Layout, family: str, kind: str, whole: dict[str, np.ndarray] | None, steps: range) -> Run:
    """Train `steps` of the same batches, from the same start in every layout or from the tensors `whole`."""
    mesh, optim = mesh_of(layout), optim_of(kind)

    def read(name, start, shape):
        here = tuple(slice(first, first + size) for first, size in zip(start, shape))
        return torch.from_numpy(np.asarray(whole[name][here]))

    model = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=7 if whole is None else read)
    optimizer = build_optimizer(model, mesh, optim)
    if whole is not None:
        fill_pieces(optimizer_pieces(model, optimizer, mesh), read)

    def save():
        pieces = [*model_pieces(model, mesh), *optimizer_pieces(model, optimizer, mesh)]
        pieces = owned_pieces(pieces, model, mesh, optim)
        return [(piece.name, piece.shape, Part(piece.name, piece.start, piece.data.numpy().copy())) for piece in pieces]

    losses, grads, before = [], [], []
    for step in steps:
        before = save()
        losses.append(forward_backward(model, mesh, step, 1, dtype=torch.float64))
        clip_gradients(model, 0.5, mesh)
        grads.append(gradients(model, mesh))
        optimizer.step()
        optimizer.zero_grad()
    num_bytes = sum(local_shard(value).nbytes for state in optimizer.state.values() for value in state.values())
    return Run(losses, grads, save(), before, num_bytes)


def together(runs: list[Run], moment: str = "saved") -> dict[str, np.ndarray]:
    """Return the global tensors at that `moment`, after checking that one rank saves each element."""
    whole, written = {}, {}
    for name, shape, part in (piece for run in runs for piece in getattr(run, moment)):
        here = tuple(slice(first, first + size) for first, size in zip(part.start, part.values.shape))
        whole.setdefault(name, np.zeros(shape, part.values.dtype))[here] = part.values
        written.setdefault(name, np.zeros(shape, int))[here] += 1
    assert all((count == 1).all() for count in written.values())
    return whole


@cache
def alone(family: str, kind: str) -> Run:
    """Return the results of one process."""
    return run_ranks(1, train, Layout(), family, kind, None, range(2))[0]


def equal(whole: dict[str, np.ndarray], family: str, kind: str) -> None:
    """Assert that the tensors are those of one process, as far as rounding allows."""
    expected, params, apart = (
        alone(family, kind),
        params_by_name(SPECS[family]),
        updates_apart(alone(family, kind).grads),
    )
    tensors = together([expected])
    assert whole.keys() == tensors.keys()
    for name, values in whole.items():
        group, _, rest = name.partition("/")
        if values.dtype == np.uint8:  # a code is one of its neighbours where rounding decides
            assert np.mean(values != tensors[name]) < 1e-3, name
            continue
        more = APART[kind]
        if group == "model" and kind in ("muon", "adamw-8bit") and not is_muon_matrix(params[rest]):
            more = more + apart.get(rest, 0.0)
        part = Part(name, (0,) * values.ndim, values)
        bound = replace(part, values=tensors[name])
        if group == "optim" and values.dtype == np.float32:
            assert np.allclose(values, tensors[name], rtol=FLOAT32, atol=0), name
        else:
            assert close(part, bound, more), (name, np.abs(values - tensors[name]).max())


LAYOUTS = [
    (Layout(tp=2, dp_shard=2, zero=3), "dense"),
    (Layout(tp=4), "dense"),
    (Layout(dp_shard=2, tp=2, zero=3, ep=2, expert_tp=2), "experts"),
    (Layout(dp_shard=4, zero=2, ep=2), "experts"),
    (Layout(dp_replicate=2), "dense"),
    (Layout(dp_shard=4, zero=1), "dense"),
    (Layout(pp=2, dp_shard=2, zero=1), "dense"),
    (Layout(tp=2, cp=2, zero=3), "dense"),
    (Layout(tp=2, pp=2), "experts"),
    (Layout(dp_replicate=2, dp_shard=2, zero=3), "experts"),
]
CASES = sampled(
    [(kind, layout, family) for layout, family in LAYOUTS for kind in KINDS],
    # The first one trains below, from where it begins to where another layout goes on.
    lambda place: len(KINDS) <= place < 3 * len(KINDS),
    lambda kind, layout, family: f"{kind}-{family}-{named(layout)}",
)


@pytest.mark.parametrize(("kind", "layout", "family"), CASES)
def test_layout_equals_one_process(ranks, kind, layout, family):
    runs = ranks(layout.world_size, train, layout, family, kind, None, range(2))
    for rank, run in enumerate(runs):
        assert run.losses == pytest.approx(alone(family, kind).losses, rel=max(TOLERANCE, APART[kind]))
        assert run.state_bytes == state_bytes(SPECS[family], layout, rank, PRECISIONS["fp64"], optim_of(kind)).optimizer
    whole = together(runs)
    states = {name: values.shape for name, values in whole.items() if name.startswith("optim/")}
    assert states == optimizer_shapes(SPECS[family], optim_of(kind))
    equal(whole, family, kind)


RESUMED = [(LAYOUTS[0], Layout(dp_shard=4, zero=1)), (LAYOUTS[2], Layout(tp=2)), (LAYOUTS[1], Layout())]


@pytest.mark.parametrize(
    ("kind", "first", "second", "family"),
    sampled(
        [(kind, first, second, family) for (first, family), second in RESUMED for kind in KINDS],
        lambda place: place < len(KINDS) or place in (5, 7),
    ),
)
def test_a_checkpoint_is_read_exactly_and_goes_on_in_any_layout(ranks, kind, first, second, family):
    runs = ranks(first.world_size, train, first, family, kind, None, range(2))
    begun, through = together(runs, "before"), together(runs)
    for layout in (first, second):
        runs = ranks(layout.world_size, train, layout, family, kind, begun, range(1, 2))
        read, resumed = together(runs, "before"), together(runs)
        assert all(np.array_equal(read[name], values) for name, values in begun.items())
        if layout == first:
            assert all(np.array_equal(resumed[name], values) for name, values in through.items())
        else:
            equal(resumed, family, kind)
