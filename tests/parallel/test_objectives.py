"""Objectives that know no layout give the same loss and gradients on every layout as in one process, in float64.

Beside language modelling: the same with weights of tokens, and an objective that couples two sequences of a row.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kumi.objectives import IGNORED, OBJECTIVES, Objective
from kumi.parallel import all_reduce_sum, build, clip_gradients
from kumi.parallel.run_microbatches import forward_backward
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from ranks import run_ranks
from steps import LENGTH, SEQUENCES, SPECS, batch, gradients, mesh_of

SEGMENTS = 4


class Pairs(Objective):
    """A loss as in DPO: the first of two segments of a row should be likelier, relative to a reference."""

    columns: ClassVar = {"segments": "token", "reference": "row"}

    def count(self, batch):
        return batch["reference"].numel() // 2

    def loss(self, log_probs, batch, units, sums):
        ahead = sums(log_probs, batch["segments"], SEGMENTS) - batch["reference"]
        return -F.logsigmoid(0.1 * (ahead[:, 0::2] - ahead[:, 1::2])).sum() / units


KINDS = {"lm": OBJECTIVES["lm"], "weighted": OBJECTIVES["lm"], "pairs": Pairs()}


def _columns(kind):
    """Return the batch of `steps.batch`, with the further columns that the objective of `kind` reads."""
    random, place = torch.Generator().manual_seed(5), torch.arange(LENGTH)
    segments = ((place >= 3).long() + (place >= 9) + (place >= 12)).expand(SEQUENCES, LENGTH).contiguous()
    weights = torch.rand(SEQUENCES, LENGTH, generator=random, dtype=torch.float64)
    return (
        batch(0)
        | ({"loss_weights": weights} if kind == "weighted" else {})
        | {"segments": segments, "reference": torch.randn(SEQUENCES, SEGMENTS, generator=random, dtype=torch.float64)}
    )


def _step(layout, kind, family, microbatches):
    """The loss, the norm of the gradients, and this rank's part of them."""
    mesh, objective = mesh_of(layout), KINDS[kind]
    model = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=7)
    whole = _columns(kind)
    share, index = SEQUENCES // layout.dp, layout.dp_index(mesh.rank)
    mine = {name: column[index * share : (index + 1) * share].chunk(microbatches) for name, column in whole.items()}
    batches = [{name: chunks[number] for name, chunks in mine.items()} for number in range(microbatches)]
    loss = forward_backward(model, mesh, objective, batches, objective.count(whole)).double()
    return all_reduce_sum(loss, mesh).item(), clip_gradients(model, 1e9, mesh).item(), gradients(model, mesh)


@cache
def alone(kind, family):
    return run_ranks(1, _step, Layout(), kind, family, 1)[0]


LAYOUTS = [
    Layout(dp_replicate=2),
    *(Layout(dp_shard=2, zero=zero) for zero in (1, 2, 3)),
    Layout(tp=2, sequence_parallel=False),
    Layout(tp=2),
    Layout(cp=2),
    Layout(cp=2, context="ulysses", zero=3),
    Layout(pp=2),
    Layout(pp=2, schedule="zb-h1", recompute="full"),
    Layout(pp=2, schedule="zb-v", stages=2),
    Layout(pp=2, cp=2),
    Layout(tp=2, dp_shard=2, zero=3, recompute="selective"),
]


# The tests of layouts train language models.
@pytest.mark.parametrize("kind", [pytest.param("lm", marks=pytest.mark.exhaustive), "weighted", "pairs"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_objective_gives_the_same_on_every_layout(ranks, layout, kind):
    loss, norm, whole = alone(kind, "llama")
    by_name = {part.name: part.values for part in whole}
    for own_loss, own_norm, parts in ranks(layout.world_size, _step, layout, kind, "llama", 2):
        assert own_loss == pytest.approx(loss, rel=1e-10)
        assert own_norm == pytest.approx(norm, rel=1e-10)
        for part in parts:
            expected = by_name[part.name]
            here = tuple(slice(first, first + size) for first, size in zip(part.start, part.values.shape))
            assert np.abs(part.values - expected[here]).max(initial=0.0) <= 1e-10 * np.abs(expected).max(), part.name


def test_weighted_tokens_are_those_of_one_formula():
    mesh, columns = mesh_of(Layout()), _columns("weighted")
    model = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=7)
    log_probs = model(columns["input_ids"], labels=columns["labels"], document_ids=columns["document_ids"])
    trained = columns["labels"] != IGNORED
    weights = columns["loss_weights"][trained]
    expected = -(weights * log_probs[trained]).sum() / weights.sum()
    assert alone("weighted", "llama")[0] == pytest.approx(expected.item(), rel=1e-6)  # token weights are float32
    assert alone("weighted", "llama")[0] != pytest.approx(alone("lm", "llama")[0], rel=1e-5)


def test_pairs_are_those_of_one_formula():
    """Compute the loss from the log-probs of the complete batch in one process."""
    mesh, columns = mesh_of(Layout()), _columns("pairs")
    model = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=7)
    log_probs = model(columns["input_ids"], labels=columns["labels"], document_ids=columns["document_ids"])
    ahead = torch.stack([log_probs[:, first:stop].sum(1) for first, stop in ((0, 3), (3, 9), (9, 12), (12, LENGTH))], 1)
    ahead = ahead - columns["reference"]
    expected = F.softplus(-0.1 * (ahead[:, (0, 2)] - ahead[:, (1, 3)])).mean()
    assert alone("pairs", "llama")[0] == pytest.approx(expected.item(), rel=1e-12)
