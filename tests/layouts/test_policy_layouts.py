"""Policy gradients and the loss of a critic, from packed rows, have the results of one process in every layout: loss,
metrics, gradient norm and gradients, in float64. One process trains from rows of one reply each, in one microbatch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from test_layouts import TOLERANCE, close
from test_objective_layouts import LAYOUTS, MICROBATCHES

from grids import named, sampled
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.policy_presets import POLICY_GRADIENTS
from kumi.objectives.ppo import ValueLoss
from kumi.parallel import all_reduce_sum, build, clip_gradients
from kumi.parallel.run_microbatches import MetricSums, forward_backward
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from ranks import run_ranks
from reply_rows import make_rows, random_replies_of
from steps import VOCAB, gradients, mesh_of, spec_of

SEQ_LEN, REPLIES, PADDING = 48, 24, 8
ALONE = [[number] for number in range(REPLIES)]
# Rows of three replies, and rows of padding.
PACKED = [[number, number + 8, 23 - number] for number in range(8)] + [[]] * PADDING
KINDS = {
    **{name: kind() for name, kind in POLICY_GRADIENTS.items()},
    "dr_grpo": POLICY_GRADIENTS["dr_grpo"](constant=9.0),
    "grpo-k3": POLICY_GRADIENTS["grpo"](kl="k3", beta=0.3, delta=1.3),
    "gspo-k2": POLICY_GRADIENTS["gspo"](kl="k2", beta=0.3, negative_limit=0.02),
    "gspo-tokens": PolicyGradient(advantage="gae", ratio="sequence", correction="none"),
    "reinforce": PolicyGradient(ratio="none", clip="none", correction="mask"),
    "value": ValueLoss(),
}


def _batch(kind, rows):
    replies = random_replies_of(REPLIES, 9, VOCAB, seed=5, tokenwise=kind in ("distill", "gspo-tokens"))
    batch = make_rows(replies, rows, SEQ_LEN)
    if kind == "value":
        batch["old_values"] = 0.1 * batch["advantages"]
        returns = batch["old_log_probs"] + 5.5
        batch["returns"] = returns.masked_fill((batch["labels"] >= 0) & (returns < 0), torch.nan)
    return batch


def _step(kind, packed, layout, family, microbatches):
    """Return the loss, the metrics, the norm of the gradients, and this rank's part of them."""
    mesh, objective = mesh_of(layout), KINDS[kind]
    spec = spec_of(f"{family}-score" if kind == "value" else family)
    model = build(spec, mesh, PRECISIONS["fp64"], weights=7)
    batch = _batch(kind, PACKED if packed else ALONE)
    order = torch.randperm(len(batch["labels"]), generator=torch.Generator().manual_seed(2))
    own = order.chunk(layout.dp)[layout.dp_index(mesh.rank)].chunk(microbatches)
    batches = [{name: column[rows] for name, column in batch.items()} for rows in own]
    metrics = MetricSums(objective, mesh)
    loss = forward_backward(model, mesh, objective, batches, objective.count(batch), metrics=metrics).double()
    measured = all_reduce_sum(metrics.sums, mesh).numpy()
    norm = clip_gradients(model, 1e9, mesh).item()
    return all_reduce_sum(loss, mesh).item(), measured, norm, gradients(model, mesh)


@cache
def alone(kind, family):
    return run_ranks(1, _step, kind, False, Layout(), family, 1)[0]


EVERY = [(kind, layout) for layout in LAYOUTS for kind in KINDS]
# Each kind where tokens of a reply lie on two ranks, and each layout with some kind.
OFTEN = {(kind, Layout(cp=2)) for kind in KINDS}
OFTEN |= {(kind, layout) for kind, layout in zip(list(KINDS) * 2, LAYOUTS, strict=False)}
CASES = sampled(EVERY, lambda place: EVERY[place] in OFTEN, lambda kind, layout: f"{kind}-{named(layout)}")


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_policy_gradient_has_the_results_of_one_process(ranks, kind, layout):
    family = "moe" if layout.ep > 1 else "llama"
    loss, metrics, norm, whole = alone(kind, family)
    by_name = {part.name: part for part in whole}
    for own_loss, own_metrics, own_norm, parts in ranks(
        layout.world_size, _step, kind, True, layout, family, MICROBATCHES
    ):
        assert own_loss == pytest.approx(loss, rel=TOLERANCE)
        assert own_metrics == pytest.approx(metrics, rel=TOLERANCE)
        assert own_norm == pytest.approx(norm, rel=TOLERANCE)
        assert [part.name for part in parts if not close(part, by_name[part.name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_cases_have_clips_and_gradients(ranks, kind):
    """Losses of the cases depend on what they name: some tokens are clipped or left out, not all."""
    _, metrics, norm, _ = alone(kind, "llama")
    assert norm > 1e-4
    shares = dict(zip(KINDS[kind].metrics, metrics, strict=True))
    names = ("clip/low", "clip/high", "mismatch/left_out", "clipped")
    bounded = [name for name in names if shares.get(name, (0, 0))[0] > 0]
    assert bool(bounded) == (kind not in ("distill", "cispo"))
    assert all(shares[name][0] < shares[name][1] for name in bounded)
