"""A step whose head leaves out ignored labels equals one whose head computes all, on every layout, in float64.

Most labels are ignored: a data-parallel rank, a context-parallel rank and a microbatch have no trained token.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from kumi.objectives import IGNORED, OBJECTIVES
from kumi.parallel import all_reduce_sum, build, clip_gradients
from kumi.parallel.run_microbatches import decoder_inputs, forward_backward, shard_batch, trained_positions
from kumi.parallel.stage_modules import stages_of
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from ranks import run_ranks
from steps import LENGTH, SEQUENCES, SPECS, batch, gradients, mesh_of

KINDS = {"lm": OBJECTIVES["lm"](), "pairs": OBJECTIVES["dpo"]()}
TRAINED = {0: (1, 2, LENGTH - 1), 1: (0, LENGTH - 2)}  # row -> its trained positions, all of the first cp rank


def _columns():
    """Return `steps.batch` with few labels, and the columns of pairs."""
    columns, place = batch(0), torch.arange(LENGTH)
    labels = torch.full_like(columns["labels"], IGNORED)
    for row, positions in TRAINED.items():
        labels[row, list(positions)] = columns["input_ids"][row, list(positions)]
    segments = ((place >= 3).long() + (place >= 9) + (place >= 12)).expand(SEQUENCES, LENGTH).contiguous()
    trained = torch.zeros(SEQUENCES, 4, dtype=torch.int64).scatter_add(1, segments, (labels != IGNORED).long())
    reference = torch.zeros(SEQUENCES, 4).double()
    return columns | {"labels": labels, "segments": segments, "trained": trained, "reference": reference}


def _step(layout, kind, microbatches, everywhere):
    """Return the loss, the norm of the gradients, this rank's part of them, and the tokens that its head computed."""
    mesh, objective = mesh_of(layout), KINDS[kind]
    model = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=7)
    whole, computed = _columns(), []
    for stage in stages_of(model).values():
        for slot in ("log_probs", "weighted_sum"):
            _count(stage, slot, computed)
    share, index = SEQUENCES // layout.dp, layout.dp_index(mesh.rank)
    mine = {name: column[index * share : (index + 1) * share].chunk(microbatches) for name, column in whole.items()}
    batches = [{name: chunks[number] for name, chunks in mine.items()} for number in range(microbatches)]
    options = {"label_positions": lambda labels: None} if everywhere else {}
    loss = forward_backward(model, mesh, objective, batches, objective.count(whole), **options).double()
    norm = clip_gradients(model, 1e9, mesh).item()
    return all_reduce_sum(loss, mesh).item(), norm, gradients(model, mesh), computed


def _count(stage, slot, computed):
    """Make the function in `slot` append the number of tokens of each call to `computed`."""
    stage = getattr(stage, "module", stage)
    function = getattr(stage, slot)

    def counted(hidden, weight, labels, *args, **options):
        computed.append(len(labels) if options["trained"] is None else len(options["trained"]))
        return function(hidden, weight, labels, *args, **options)

    setattr(stage, slot, counted)


@cache
def complete(kind):
    loss, norm, parts, computed = run_ranks(1, _step, Layout(), kind, 1, True)[0]
    assert computed == [SEQUENCES * LENGTH]
    return loss, norm, {part.name: part.values for part in parts}


# Layout, microbatches, tokens that the head of each rank computes in each microbatch.
CASES = [
    (Layout(), 2, [[5, 0]]),
    (Layout(dp_replicate=2), 1, [[5], [0]]),
    (Layout(dp_shard=2, zero=3), 2, [[5, 0], [0, 0]]),
    (Layout(tp=2, sequence_parallel=False), 2, [[5, 0]] * 2),
    (Layout(tp=2), 2, [[5, 0]] * 2),
    (Layout(cp=2), 1, [[5], [0]]),
    (Layout(cp=2, context="ulysses", zero=3), 2, [[5, 0], [0, 0]]),
    (Layout(pp=2), 2, [[], [5, 0]]),
    (Layout(pp=2, schedule="zb-h1", recompute="full"), 2, [[], [5, 0]]),
    (Layout(tp=2, cp=2), 2, [[5, 0]] * 2 + [[0, 0]] * 2),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layout", "microbatches", "tokens"), CASES, ids=str)
def test_leaving_out_ignored_labels_changes_no_result(kind, layout, microbatches, tokens):
    loss, norm, whole = complete(kind)
    results = run_ranks(layout.world_size, _step, layout, kind, microbatches, False)
    assert [computed for *_, computed in results] == tokens
    for own_loss, own_norm, parts, _ in results:
        assert own_loss == pytest.approx(loss, rel=1e-10)
        assert own_norm == pytest.approx(norm, rel=1e-10)
        for part in parts:
            expected = whole[part.name]
            here = tuple(slice(first, first + size) for first, size in zip(part.start, part.values.shape))
            assert np.abs(part.values - expected[here]).max(initial=0.0) <= 1e-10 * np.abs(expected).max(), part.name


def test_few_ignored_labels_leave_the_head_as_it_is():
    labels = torch.ones(2, 8, dtype=torch.int64)
    labels[0, 3] = IGNORED
    assert trained_positions(labels) is None
    labels[1, 7] = IGNORED  # an eighth
    assert trained_positions(labels).tolist() == [0, 1, 2, *range(4, 15)]
    assert trained_positions(torch.full((2, 8), IGNORED)).tolist() == []


def test_a_stage_returns_the_scores_that_are_asked_for():
    mesh, columns = mesh_of(Layout()), _columns()
    model = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=7)
    inputs = decoder_inputs(shard_batch(OBJECTIVES["lm"](), columns, mesh))
    assert len(inputs["head_positions"]) == 5
    log_probs = model(**inputs)
    scores = model(**inputs, statistics=("entropy", "top"))
    assert torch.equal(scores.log_probs, log_probs)
    assert scores.log_probs.requires_grad
    logits = model(columns["input_ids"], document_ids=columns["document_ids"])
    counted = columns["labels"] != IGNORED
    assert torch.equal(scores.top, (logits.argmax(-1) == columns["labels"]) & counted)
    entropy = torch.distributions.Categorical(logits=logits).entropy() * counted
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-12, atol=1e-12)
