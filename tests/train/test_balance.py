"""Balancing of experts in every layout: loss, gradient and biases as in one process."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from kumi.config.balance_section import Balance
from kumi.nn.router import routers
from kumi.parallel import build, clip_gradients
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from kumi.train import expert_balance
from ranks import run_ranks
from steps import LENGTH, SEQUENCES, SPECS, forward_backward, mesh_of


def two_steps(layout, microbatches):
    """Return losses, loads of the busiest expert and gradient norms of two steps, and biases of this rank's layers.

    The first step has an auxiliary loss over sequences, the second one moves routing biases.
    """
    mesh, spec = mesh_of(layout), SPECS["latent"]
    model = build(spec, mesh, PRECISIONS["fp64"], weights=7)
    batch, seen = SimpleNamespace(tokens_per_step=SEQUENCES * LENGTH), []
    for step, expected in enumerate((Balance("aux", 0.5, True), Balance("loss-free", 0.25))):
        run = SimpleNamespace(balance=expected, model=spec, batch=batch)
        expert_balance.prepare_routers(model, run, 1.0)
        forward_backward(model, mesh, step, microbatches, dtype=torch.float64)
        shares = expert_balance.balance_experts(model, run, mesh, 1.0)
        seen += [shares.aux_loss.item(), shares.busiest.item(), clip_gradients(model, None, mesh).item()]
        for parameter in model.parameters():
            parameter.grad = None
    return seen, [router.e_score_correction_bias.tolist() for _, router in routers(model)]


@cache
def alone():
    return run_ranks(1, two_steps, Layout(), 1)[0]


LAYOUTS = [
    Layout(dp_replicate=2),
    Layout(dp_shard=2, zero=3),
    Layout(dp_shard=2, zero=1, ep=2),
    Layout(pp=2),
    Layout(cp=2),
    Layout(tp=2),
    Layout(tp=2, ep=2),
    Layout(tp=2, expert_tp=2),
]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_experts_are_balanced_as_in_one_process(ranks, layout, microbatches):
    expected, biases = alone()
    results = ranks(2, two_steps, layout, microbatches)
    for seen, _ in results:
        assert seen == pytest.approx(expected, rel=1e-10)
    trained = [bias for _, mine in results for bias in mine] if layout.pp > 1 else results[1][1]
    assert trained == biases
    assert any(value != 0 for value in biases[0])
