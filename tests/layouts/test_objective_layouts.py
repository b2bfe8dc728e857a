"""Every objective, with every kind of adapters, from packed and unpacked rows, has the results of one process in every
layout: loss, metrics, gradient norm and gradients, in float64.

The cases cover all pairs of an objective, adapters, a reference, a packing and a layout. One process trains from rows
of one unit each, in one microbatch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from test_layouts import TOLERANCE, close
from test_lora_layouts import LORAS, _read

from grids import all_pairs, named, sampled
from kumi.data import SequentialSampler
from kumi.data.packing import Bins, PackedRows, pack, positions_of
from kumi.objectives import OBJECTIVES
from kumi.parallel import all_reduce_sum, build, clip_gradients
from kumi.parallel.run_microbatches import MetricSums, forward_backward
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.precision import PRECISIONS
from memory_units import random_replies, random_units
from ranks import run_ranks
from steps import SPECS, VOCAB, gradients, mesh_of, spec_of

SEQ_LEN, UNITS, ROWS = 48, 24, 24  # of ROWS, some are padding if the units are packed
KINDS = {
    "lm": OBJECTIVES["lm"](),
    "sft": OBJECTIVES["sft"](),
    "dpo": OBJECTIVES["dpo"](beta=0.5, margin=1.0, sft=0.3),
    "ipo": OBJECTIVES["dpo"](loss_type="ipo", beta=0.2),
    "kto": OBJECTIVES["kto"](beta=0.5, undesirable_weight=1.33),
    "orpo": OBJECTIVES["orpo"](beta=0.7),
    "simpo": OBJECTIVES["simpo"](sft=0.2),
    "cpo": OBJECTIVES["cpo"](beta=0.4),
    "reward": OBJECTIVES["reward"](center_rewards=0.1),
}
ADAPTERS = {
    "full": None,
    "lora": LORAS["lora"],
    "dora": LORAS["dora"],
    "qlora": LORAS["packed"],
    "experts": LORAS["experts"],
}
# By default the reference's log-probs are a column; else the model without adapters computes them.
REFERENCES = ("stored", "adapters-off")
LAYOUTS = [
    Layout(dp_replicate=2),
    *(Layout(dp_shard=2, zero=zero) for zero in (1, 2, 3)),
    Layout(tp=2, sequence_parallel=False),
    Layout(tp=2, recompute="selective"),
    Layout(cp=2),
    Layout(cp=2, context="ulysses", zero=3),
    Layout(dp_shard=2, zero=3, ep=2, recompute="full"),
    Layout(pp=2),
    Layout(pp=2, schedule="gpipe"),
    Layout(pp=2, schedule="interleaved", stages=2),
    Layout(pp=2, schedule="zb-h1"),
    Layout(pp=2, schedule="zb-h2"),
    Layout(pp=2, schedule="zb-v", stages=2),
    Layout(pp=2, schedule="dualpipe", stages=2, recompute="full"),
    Layout(pp=2, cp=2),
    Layout(tp=2, dp_shard=2, zero=3),
]
MICROBATCHES = 4  # of a data-parallel rank; the least that all schedules take

# Two tp ranks shard every matrix between blocks of 64 elements, which four bits need.
_LAYER = LayerSpec(Attention(4, 2, 32, Rope(10000.0)), MLP(128))
_WIDE = ModelSpec("llama", VOCAB, 64, (_LAYER,) * 3, 1e-5, 128)


def _exists(objective: str, adapters: str, reference: str, packed: bool, layout: Layout) -> bool:
    """Return True unless the reference needs adapters, or an objective that compares, that the case does not have, or
    the layout is refused for models with experts."""
    if reference == "adapters-off" and (adapters == "full" or not KINDS[objective].reference):
        return False
    return adapters != "experts" or layout.tp == 1 or layout.sequence_parallel


def _family(adapters: str, layout: Layout) -> str:
    if layout.ep > 1 or adapters == "experts":
        return "moe"
    return "wide" if adapters == "qlora" else "llama"


def _spec(objective: str, adapters: str, family: str) -> ModelSpec:
    SPECS["wide"] = _WIDE
    return replace(spec_of(f"{family}-score" if objective == "reward" else family), lora=ADAPTERS[adapters])


def _batch(objective: str, packed: bool, reference: str) -> dict[str, torch.Tensor]:
    """Return rows of all units; unpacked rows have one unit each."""
    form, random = KINDS[objective].rows, np.random.default_rng(5)
    if form.sequences:
        sides = 1 if objective == "kto" else 2
        units = random_replies(Path("units"), UNITS, 9, 3, vocab=VOCAB, sides=sides, kind=form.kinds[0])
    else:
        units = random_units(Path("units"), UNITS, 20, 3, vocab=VOCAB, weighted=objective == "sft")
    trained = np.array([(mask & 1).sum() for unit in units.sequences for _, mask, _ in unit])
    own, other = (-5.5 * lengths + random.normal(size=len(trained)) for lengths in (trained, np.roll(trained, 1)))
    lengths = positions_of(units, form)
    if packed:
        bins = pack(lengths, SEQ_LEN, 1)
    else:
        present = np.flatnonzero(lengths > 0).astype(np.int32)
        bins = Bins(present, np.arange(len(present) + 1, dtype=np.int32), 0, UNITS - len(present))
    sums = {"reference": own, "mismatched": other if form.mismatched else None} if KINDS[objective].reference else {}
    rows = PackedRows(units, bins, SEQ_LEN, form, *sums.values())
    assert (rows.rows < UNITS / 2) == packed
    batch = SequentialSampler([rows], SEQ_LEN).batch(0, ROWS)
    dropped = ("reference", "mismatched_reference") if reference == "adapters-off" else ()
    return {name: torch.from_numpy(column) for name, column in batch.items() if name not in dropped}


def _step(objective: str, adapters: str, reference: str, packed: bool, layout: Layout, family: str, microbatches: int):
    """Return the loss, the metrics, the norm of the gradients, and this rank's part of them."""
    mesh, loss_of, spec = mesh_of(layout), KINDS[objective], _spec(objective, adapters, family)
    precision = PRECISIONS["fp64"]
    model = build(spec, mesh, precision, weights=7, adapters=lambda *piece: _read(spec, *piece))
    whole = _batch(objective, packed, reference)
    # Every microbatch of every rank has units, also where the last rows are padding.
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    own = order.chunk(layout.dp)[layout.dp_index(mesh.rank)].chunk(microbatches)
    batches = [{name: column[rows] for name, column in whole.items()} for rows in own]
    metrics = MetricSums(loss_of, mesh)
    loss = forward_backward(model, mesh, loss_of, batches, loss_of.count(whole), metrics=metrics).double()
    measured = all_reduce_sum(metrics.sums, mesh).numpy()
    norm = clip_gradients(model, 1e9, mesh).item()
    return all_reduce_sum(loss, mesh).item(), measured, norm, gradients(model, mesh)


@cache
def alone(objective: str, adapters: str, reference: str, family: str):
    return run_ranks(1, _step, objective, adapters, reference, False, Layout(), family, 1)[0]


EVERY = [case for case in product(KINDS, ADAPTERS, REFERENCES, (False, True), LAYOUTS) if _exists(*case)]
COVERING = all_pairs(EVERY)
# One case for each objective, of different adapters and layouts; all have their own tests as well.
OFTEN = [
    ("sft", "experts", "stored", True, Layout(dp_shard=2, zero=3, ep=2, recompute="full")),
    ("dpo", "qlora", "adapters-off", True, Layout(tp=2, recompute="selective")),
    ("kto", "dora", "adapters-off", True, Layout(cp=2)),
    ("reward", "lora", "stored", True, Layout(pp=2, schedule="zb-h1")),
]
CASES = sorted({*COVERING, *OFTEN}, key=EVERY.index)


def _id(objective: str, adapters: str, reference: str, packed: bool, layout: Layout) -> str:
    return "-".join([objective, adapters, reference, "packed" if packed else "alone", named(layout)])


@pytest.mark.parametrize(
    ("objective", "adapters", "reference", "packed", "layout"), sampled(CASES, lambda place: CASES[place] in OFTEN, _id)
)
def test_every_path_has_the_results_of_one_process(ranks, objective, adapters, reference, packed, layout):
    if adapters == "qlora" and find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    family = _family(adapters, layout)
    loss, metrics, norm, whole = alone(objective, adapters, reference, family)
    by_name = {part.name: part for part in whole}
    results = ranks(layout.world_size, _step, objective, adapters, reference, packed, layout, family, MICROBATCHES)
    for own_loss, own_metrics, own_norm, parts in results:
        assert own_loss == pytest.approx(loss, rel=TOLERANCE)
        assert own_metrics == pytest.approx(metrics, rel=TOLERANCE)
        assert own_norm == pytest.approx(norm, rel=TOLERANCE)
        assert [part.name for part in parts if not close(part, by_name[part.name])] == []
    assert {part.name for *_, parts in results for part in parts} == set(by_name)


def test_the_cases_cover_all_pairs():
    def pairs(cases):
        return {
            (first, case[first], second, case[second])
            for case in cases
            for first in range(5)
            for second in range(first)
        }

    assert pairs(COVERING) == pairs(EVERY)
    assert len(COVERING) < len(EVERY) / 5
