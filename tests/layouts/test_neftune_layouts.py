"""NEFTune adds the same noise in every layout, none in evaluation, and the noise of a step again after a resume."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from test_layouts import TOLERANCE

from kumi.parallel import build, clip_gradients, init_adamw, unwrap
from kumi.parallel.embedding_noise import begin_noise_step, use_neftune
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from steps import SEQUENCES, SPECS, batch, forward_backward, mesh_of

ALPHA = 5.0


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    norms: list[float]


def train(layout: Layout, family: str, microbatches: int, alpha: float = ALPHA, first: int = 0) -> Trace:
    mesh, spec = mesh_of(layout), SPECS[family]
    model = build(spec, mesh, PRECISIONS["fp64"], weights=7)
    use_neftune(model, mesh, alpha)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(spec), Optim(lr=1e-2))
    losses, norms = [], []
    for step in range(first, first + 2):
        begin_noise_step(model, mesh, 3, step, SEQUENCES // layout.dp)
        losses.append(forward_backward(model, mesh, step, microbatches, dtype=torch.float64))
        norms.append(clip_gradients(model, 0.5, mesh).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trace(losses, norms)


@cache
def alone(run, family: str) -> Trace:
    return run(1, train, Layout(), family, 1)[0]


CASES = [
    (Layout(dp_shard=2, tp=2, zero=3), "llama", 2),
    (Layout(tp=2, sequence_parallel=False), "gpt", 1),
    (Layout(cp=2, pp=2), "gemma", 3),
]
LATER = [
    (Layout(), "llama", 4),
    (Layout(dp_replicate=2), "llama", 3),
    (Layout(tp=2), "gpt", 2),
    (Layout(cp=2, context="ulysses"), "llama", 1),
    (Layout(cp=2, tp=2), "gemma", 2),
    (Layout(tp=2, pp=2, schedule="zb-v", stages=2), "deep-tied", 3),
    (Layout(pp=2, stages=2, schedule="interleaved", recompute="full"), "deep", 6),
    (Layout(dp_shard=2, zero=1, ep=2), "moe", 3),
]


def _name(case) -> str:
    layout, family, _ = case
    changed = [f"{key}{value}" for key, value in vars(layout).items() if value != getattr(Layout(), key)]
    return "-".join([*changed, family])


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in LATER)], ids=_name
)
def test_layout_equals_one_process(ranks, case):
    layout, family, microbatches = case
    expected = alone(ranks, family)
    for trace in ranks(layout.world_size, train, layout, family, microbatches):
        assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert trace.norms == pytest.approx(expected.norms, rel=TOLERANCE)


def test_noise_changes_the_loss_and_belongs_to_the_step(ranks):
    noisy, plain = alone(ranks, "llama"), ranks(1, train, Layout(), "llama", 1, 0.0)[0]
    assert all(abs(one - other) > 1e-4 for one, other in zip(noisy.losses, plain.losses, strict=True))
    # A run that begins with the second step has its noise: equal weights would give equal losses.
    again = [ranks(1, train, Layout(), "llama", 1, ALPHA, 1)[0].losses[0] for _ in range(2)]
    assert again[0] == again[1]


def _evaluate(layout: Layout) -> tuple[torch.Tensor, ...]:
    mesh = mesh_of(layout)
    model = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=7)
    use_neftune(model, mesh, ALPHA)
    begin_noise_step(model, mesh, 3, 0, SEQUENCES)
    ids = batch(0)["input_ids"]
    trained = model(ids).detach()
    with torch.no_grad():
        reference = model(ids)
    return trained, reference, model.eval()(ids).detach()


def test_evaluation_and_a_reference_pass_have_no_noise(ranks):
    trained, reference, evaluated = ranks(1, _evaluate, Layout())[0]
    assert reference.equal(evaluated)
    assert not trained.equal(evaluated)
