"""Rows of packed pairs and replies give the losses of the units alone, in float64: with any order of the rows, in one
microbatch or several, and under context parallelism, which splits sequences over ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from kumi.data import SequentialSampler
from kumi.data.packing import PackedRows, pack, positions_of
from kumi.objectives import IGNORED, OBJECTIVES
from kumi.parallel import all_reduce_sum, build, clip_gradients
from kumi.parallel.run_microbatches import forward_backward
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from memory_units import random_replies
from ranks import run_ranks
from steps import SPECS, VOCAB, mesh_of

SEQ_LEN, UNITS = 48, 30
KINDS = {"dpo": OBJECTIVES["dpo"](margin=1.0), "kto": OBJECTIVES["kto"](beta=0.5), "simpo": OBJECTIVES["simpo"]()}
SIDES = {"dpo": 2, "kto": 1, "simpo": 2}


def _units(kind):
    """Return units, and the reference log-probs of their sequences and of their mismatched sequences."""
    form = KINDS[kind].rows
    units = random_replies(Path("units"), UNITS, 9, 3, vocab=VOCAB, sides=SIDES[kind], kind=form.kinds[0])
    random = np.random.default_rng(5)
    trained = np.array([mask.sum() for unit in units.sequences for _, mask, _ in unit])
    reference = -5.5 * trained + random.normal(size=len(trained))
    return units, reference, -5.5 * np.roll(trained, 1) + random.normal(size=len(trained))


def _rows(kind, chosen=None, seq_len=SEQ_LEN):
    """Return all packed rows of the units, or those of rows which have one unit each, as a batch of tensors."""
    units, reference, mismatched = _units(kind)
    form = KINDS[kind].rows
    bins = pack(positions_of(units, form), seq_len, 1)
    rows = PackedRows(units, bins, seq_len, form, reference, mismatched if form.mismatched else None)
    count = -(-rows.rows // 4) * 4
    batch = SequentialSampler([rows], seq_len).batch(0, count)
    return {name: torch.from_numpy(column) for name, column in batch.items()}


def _alone(kind):
    """Return a batch of one sequence in each row, made here from the units, and what the loss needs of them."""
    units, reference, mismatched = _units(kind)
    return units.sequences, reference.reshape(UNITS, -1), mismatched


def _expected(kind):
    """Return the loss of all units, from the log-probs of each sequence alone."""
    model = build(SPECS["llama"], mesh_of(Layout()), PRECISIONS["fp64"], weights=7)

    def total(ids, mask):
        ids = torch.from_numpy(ids.astype(np.int64))[None]
        labels = torch.where(torch.from_numpy(mask.copy())[None] > 0, ids, IGNORED)[:, 1:]
        return model(ids[:, :-1], labels=labels).sum().item()

    sequences, reference, mismatched = _alone(kind)
    totals = np.array([[total(ids, mask) for ids, mask, _ in unit] for unit in sequences])
    ahead = totals - reference
    if kind == "dpo":
        return np.logaddexp(0, -(0.1 * (ahead[:, 0] - ahead[:, 1]) - np.arange(UNITS) / 4)).mean()
    if kind == "simpo":
        means = totals / [[mask.sum() for _, mask, _ in unit] for unit in sequences]
        return np.logaddexp(0, -(2 * (means[:, 0] - means[:, 1]) - 0.5)).mean()
    kl = []
    for number, [(ids, mask, _)] in enumerate(sequences):
        [(other, other_mask, _)] = sequences[number - 1]
        prompt, reply = ids[mask == 0], other[other_mask > 0]
        both = np.concatenate([prompt, reply])
        kl.append(total(both, np.arange(len(both)) >= len(prompt)) - mismatched[number])
    z = max(0.0, np.mean(kl))
    sign = np.where(np.arange(UNITS) % 2 == 1, 1, -1)  # the labels of random units alternate
    return (1 - 1 / (1 + np.exp(-0.5 * sign * (ahead[:, 0] - z)))).mean()


def _loss(layout, kind, microbatches, order):
    mesh, whole, objective = mesh_of(layout), _rows(kind), KINDS[kind]
    model = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=7)
    rows = torch.randperm(len(whole["labels"]), generator=torch.Generator().manual_seed(order))
    own = rows.chunk(layout.dp)[layout.dp_index(mesh.rank)]
    batches = [{name: column[part] for name, column in whole.items()} for part in own.chunk(microbatches)]
    loss = forward_backward(model, mesh, objective, batches, objective.count(whole)).double()
    return all_reduce_sum(loss, mesh).item(), clip_gradients(model, 1e9, mesh).item()


@cache
def alone(kind):
    return _loss(Layout(), kind, 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_whole_units(kind):
    batch, (units, reference, _) = _rows(kind), _units(kind)
    assert KINDS[kind].count(batch) == UNITS
    assert int((batch["labels"] != IGNORED).sum()) == sum(mask.sum() for unit in units.sequences for _, mask, _ in unit)
    assert batch["trained"].sum() == (batch["labels"] != IGNORED).sum()
    assert float(batch["reference"].sum()) == pytest.approx(reference.sum(), rel=1e-12)
    assert len(batch["labels"]) < UNITS / 2


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_have_the_loss_of_their_units(kind):
    assert alone(kind)[0] == pytest.approx(_expected(kind), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("microbatches", "order"), [(4, 0), (2, 2)])
def test_the_order_of_rows_and_microbatches_do_not_matter(kind, microbatches, order):
    assert _loss(Layout(), kind, microbatches, order) == pytest.approx(alone(kind), rel=1e-12)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(dp_shard=2, zero=3)], ids=lambda layout: layout.words)
def test_packed_rows_have_the_loss_of_their_units_on_two_ranks(kind, layout):
    for result in run_ranks(2, _loss, layout, kind, 2, 1):
        assert result == pytest.approx(alone(kind), rel=1e-12)


def test_a_scored_sequence_has_one_label_at_its_last_token():
    units, form = random_replies(Path("units"), UNITS, 9, 3, vocab=VOCAB), OBJECTIVES["reward"].rows
    rows = PackedRows(units, pack(positions_of(units, form), SEQ_LEN, 1), SEQ_LEN, form)
    batch = SequentialSampler([rows], SEQ_LEN).batch(0, rows.rows)
    assert (np.sort(batch["trained"][batch["trained"] > 0]) == 1).all()
    assert OBJECTIVES["reward"]().count(batch) == UNITS
    assert OBJECTIVES["reward"]().tokens(batch) == sum(len(ids) for unit in units.sequences for ids, _, _ in unit)
    assert OBJECTIVES["dpo"]().tokens(batch) == 2 * UNITS
    for row in range(rows.rows):
        sequences = [sequence for unit in rows.units_of(row) for sequence in units.sequences[unit]]
        ends = np.cumsum([len(ids) for ids, _, _ in sequences]) - 1
        assert np.array_equal(np.flatnonzero(batch["labels"][row] != IGNORED), ends)
        assert np.array_equal(batch["input_ids"][row, : ends[-1] + 1], np.concatenate([ids for ids, _, _ in sequences]))
