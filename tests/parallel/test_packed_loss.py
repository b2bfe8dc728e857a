"""Packed rows train as their sequences alone, in float64: the losses and gradients are equal in any order of the rows,
in one microbatch or several, and on two ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from kumi.data import SequentialSampler
from kumi.data.packing import PackedRows, pack, positions_of
from kumi.objectives import OBJECTIVES
from kumi.parallel import all_reduce_sum, build, clip_gradients
from kumi.parallel.run_microbatches import forward_backward
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from memory_units import random_units
from ranks import run_ranks
from steps import SPECS, VOCAB, mesh_of

SEQ_LEN, LM = 48, OBJECTIVES["lm"]()


def _packed(weighted):
    """Return all packed rows of 40 units, padded to a multiple of four rows, and the units that they have."""
    units = random_units(Path("units"), 40, 20, 3, vocab=VOCAB, weighted=weighted)
    rows = PackedRows(units, pack(positions_of(units), SEQ_LEN, 1), SEQ_LEN)
    batch = SequentialSampler([rows], SEQ_LEN).batch(0, -(-rows.rows // 4) * 4)
    return _tensors(batch), [units.sequences[number] for number in rows.bins.units]


def _tensors(batch):
    return {name: torch.from_numpy(column) for name, column in batch.items()}


def _alone(sequences):
    """Return each sequence as a batch of one row without padding."""
    for ids, mask, weights in sequences:
        if len(ids) > 1:
            yield {
                "input_ids": torch.from_numpy(ids[None, :-1].astype(np.int64)),
                "labels": torch.from_numpy(np.where(mask & 1, ids.astype(np.int64), -100)[None, 1:]),
                "loss_weights": torch.from_numpy(weights[None, 1:]),
            }


def _losses(layout, weighted, microbatches, order, packed):
    """Return the loss of all rows and the norm of the gradients."""
    mesh, (whole, units) = mesh_of(layout), _packed(weighted)
    model = build(SPECS["llama"], mesh, PRECISIONS["fp64"], weights=7)
    if packed:
        rows = torch.randperm(len(whole["labels"]), generator=torch.Generator().manual_seed(order))
        own = rows.chunk(layout.dp)[layout.dp_index(mesh.rank)]
        batches = [{name: column[part] for name, column in whole.items()} for part in own.chunk(microbatches)]
    else:
        batches = list(_alone(sequence for unit in units for sequence in unit))
        for batch in batches if not weighted else []:
            del batch["loss_weights"]
    loss = forward_backward(model, mesh, LM, batches, LM.count(whole)).double()
    return all_reduce_sum(loss, mesh).item(), clip_gradients(model, 1e9, mesh).item()


@cache
def unpacked(weighted):
    return _losses(Layout(), weighted, 1, 0, packed=False)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("microbatches", "order"), [(1, 0), (1, 1), (4, 0), (2, 2)])
def test_packed_rows_equal_their_sequences_alone(weighted, microbatches, order):
    loss, norm = _losses(Layout(), weighted, microbatches, order, packed=True)
    assert loss == pytest.approx(unpacked(weighted)[0], rel=1e-12)
    assert norm == pytest.approx(unpacked(weighted)[1], rel=1e-12)


LAYOUTS = [
    Layout(dp_shard=2, zero=3),
    Layout(cp=2),
    pytest.param(Layout(tp=2), marks=pytest.mark.exhaustive),
    pytest.param(Layout(pp=2), marks=pytest.mark.exhaustive),
    pytest.param(Layout(cp=2, context="ulysses"), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_rows_equal_their_sequences_alone_on_two_ranks(layout):
    for loss, norm in run_ranks(2, _losses, layout, True, 2, 1, True):
        assert loss == pytest.approx(unpacked(True)[0], rel=1e-12)
        assert norm == pytest.approx(unpacked(True)[1], rel=1e-10)
