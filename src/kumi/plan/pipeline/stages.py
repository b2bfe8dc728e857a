"""Which layers each pipeline rank holds: stages of equal size or balanced by cost, as arrays over many layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, Ints, LayoutBatch
from kumi.plan.pipeline.timeline import in_flight
from kumi.plan.unique_rows import unique_rows
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.model import ModelSpec
from kumi.spec.schedule import stage_of
from kumi.spec.schedules import V_SHAPED
from kumi.spec.sharding import FsdpUnit, even_stages, fsdp_units, rank_layers, stage_ops


class RankStages(NamedTuple):
    """The layers of one pp rank over all its stages, for every row (one layout and one rank).

    `layers`: the number of layers of each of `model.unique_layers()`, (kinds, rows).
    `embedding`, `head`: 1 where the rank holds it, else 0, (rows,).
    `in_flight`: microbatches with activations in memory at the peak, (rows,).
    `last`: 1 for the kind of the rank's last layer, else 0, (kinds, rows).
    """

    layers: Floats
    embedding: Floats
    head: Floats
    in_flight: Floats
    last: Floats

    def take(self, index: Ints) -> RankStages:
        """Return the rows `index`."""
        ends = self.embedding[index], self.head[index], self.in_flight[index]
        return RankStages(self.layers[:, index], *ends, self.last[:, index])


def rank_stages(
    model: ModelSpec, layouts: LayoutBatch, rank: Ints, microbatches: Ints, stage_layers: Sequence[int] = ()
) -> RankStages:
    """Return the layers of pp rank `rank` of every row, in steps of `microbatches` microbatches.

    `stage_layers`: the number of layers of each stage, for all rows; empty for an even division.
    """
    v_shaped = layouts.one_of("schedule", V_SHAPED)
    # Millions of layouts share a few divisions of the layers.
    unique, index = unique_rows(layouts.pp, layouts.stages, v_shaped.astype(np.int64), rank)
    layers, last = _layers_by_kind(model, layouts.take(unique), rank[unique], stage_layers)
    # A V-shaped schedule brings the last stage back to the first rank.
    head = np.where(v_shaped, rank == 0, rank == layouts.pp - 1)
    return RankStages(
        layers[:, index],
        (rank == 0).astype(np.float64),
        head.astype(np.float64),
        in_flight(layouts.schedule, layouts.pp, layouts.stages, microbatches, rank),
        last[:, index],
    )


def _layers_by_kind(
    model: ModelSpec, layouts: LayoutBatch, rank: Ints, stage_layers: Sequence[int]
) -> tuple[Floats, Floats]:
    """Return the number of layers of each kind on pp rank `rank`, and 1 for the kind of its last layer, else 0."""
    kinds, kind_of_layer = model.unique_layers()
    if len(kinds) == 1 and not len(stage_layers):
        layers: Floats = rank_layers(layouts, len(kind_of_layer), rank)[None, :].astype(np.float64)
        return layers, np.minimum(layers, 1.0)
    firsts = np.concatenate([[0], np.cumsum(stage_layers)]).astype(np.int64)
    v_shaped, last_stage = layouts.one_of("schedule", V_SHAPED), layouts.pp * layouts.stages - 1
    before, layer_kinds = _kinds_before(len(kinds), kind_of_layer), np.array(kind_of_layer)
    even = even_stages(len(kind_of_layer), last_stage + 1)
    layers, last_kind = np.zeros((len(kinds), len(layouts))), np.full(len(layouts), -1)
    # `chunk` counts the stages of a rank.
    for chunk in range(int(layouts.stages.max(initial=1))):
        stage = np.minimum(stage_of(v_shaped, layouts.pp, rank, chunk), last_stage)
        if len(stage_layers):
            first, end = firsts[stage], firsts[stage + 1]
        else:
            first, end = (_first_layer(*even, each) for each in (stage, stage + 1))
        layers += np.where(chunk < layouts.stages, before[:, end] - before[:, first], 0)
        last_kind = np.where((chunk < layouts.stages) & (end > first), layer_kinds[end - 1], last_kind)
    return layers, (last_kind == np.arange(len(kinds))[:, None]).astype(np.float64)


def embedding_and_head_units(model: ModelSpec, stages: RankStages) -> list[tuple[FsdpUnit, Floats]]:
    """Return the FSDP units of the embedding and the head, each with 1 for the rows that hold it, else 0."""
    first, last = stages.embedding, stages.head
    rows = {(True, True): first * last, (True, False): first * (1 - last), (False, True): last * (1 - first)}
    return [(unit, np.asarray(sum(rows[case] for case in cases))) for unit, cases in _embedding_and_head_cases(model)]


@lru_cache(maxsize=64)
def _embedding_and_head_cases(model: ModelSpec) -> tuple[tuple[FsdpUnit, tuple[tuple[bool, bool], ...]], ...]:
    """Return the distinct FSDP units of the embedding and the head, each with the ranks that have this unit.

    A rank is given as (has the embedding, has the head); its units differ when it has both.
    """
    cases_of: dict[FsdpUnit, list[tuple[bool, bool]]] = {}
    for embedding, head in ((True, True), (True, False), (False, True)):
        for unit in fsdp_units(stage_ops(model, (), embedding=embedding, head=head)):
            cases_of.setdefault(unit, []).append((embedding, head))
    return tuple((unit, tuple(cases)) for unit, cases in cases_of.items())


def first_layer_of_stage(layers: int, stages: Ints, stage: Ints) -> Ints:
    """Return the first layer of `stage` when `layers` are divided evenly over `stages`.

    For stage = stages, return `layers`. See `kumi.spec.sharding.even_stages`.
    """
    return _first_layer(*even_stages(layers, stages), stage)


def _first_layer(base: Ints, begin: Ints, end: Ints, stage: Ints) -> Ints:
    """Return the first layer of `stage` when stages have `base` layers, and those in [begin, end) one more."""
    return base * stage + np.maximum(np.minimum(stage, end) - begin, 0)


@lru_cache(maxsize=64)
def layers_before_largest(model: ModelSpec) -> int:
    """Return the number of layers before the first one of the kind with the most parameters."""
    sizes = [sum(param.numel for op in ops for param in op.params) for ops in unique_layer_ops(model)]
    return model.unique_layers()[1].index(sizes.index(max(sizes)))


def balance_stages(
    costs: Sequence[float], stages: int, first_extra: float = 0.0, last_extra: float = 0.0
) -> tuple[int, ...]:
    """Return the number of layers of each of `stages` that makes the most expensive stage as cheap as possible.

    `costs`: the cost of each layer, in model order.
    `first_extra`, `last_extra`: additional costs of the first stage (the embedding) and the last (the head). Only
    these two stages may have no layers.

    Ties are broken by the smallest sum of the squared stage costs. `stages` must be at most layers + 2.
    """
    sums = np.concatenate([[0.0], np.cumsum(costs, dtype=np.float64)])
    table = [_stage_costs(sums, stage, stages, first_extra, last_extra) for stage in range(stages)]
    bound = _least_maximum(table)
    # Raise the bound slightly, so that rounding excludes no division.
    return _most_even(table, bound * (1 + 1e-12) + 1e-300)


def _stage_costs(sums: Floats, stage: int, stages: int, first_extra: float, last_extra: float) -> Floats:
    """Return the cost of `stage` with layers [i, j), (layers + 1, layers + 1); infinite if not allowed.

    `sums`: the summed costs of the layers before each layer, (layers + 1,).
    """
    costs = sums[None, :] - sums[:, None] + first_extra * (stage == 0) + last_extra * (stage == stages - 1)
    least = 0 if stage in (0, stages - 1) else 1
    layers = np.arange(len(sums))[None, :] - np.arange(len(sums))[:, None]
    return np.where(layers >= least, costs, np.inf)


def _least_maximum(table: list[Floats]) -> float:
    """Return the smallest possible cost of the most expensive stage; `table` has the `_stage_costs` of each stage."""
    best = np.full(len(table[0]), np.inf)
    best[0] = 0.0
    for costs in table:
        best = np.min(np.maximum(best[:, None], costs), axis=0)
    return float(best[-1])


def _most_even(table: list[Floats], bound: float) -> tuple[int, ...]:
    """Return the layers of each stage with the smallest sum of squared costs, no stage costing more than `bound`."""
    best = np.full(len(table[0]), np.inf)
    best[0] = 0.0
    origins = []
    for costs in table:
        sums = best[:, None] + np.where(costs <= bound, costs, np.inf) ** 2
        origins.append(np.argmin(sums, axis=0))
        best = np.min(sums, axis=0)
    end, counts = len(best) - 1, []
    for origin in reversed(origins):
        counts.append(int(end - origin[end]))
        end = int(origin[end])
    return tuple(reversed(counts))


def _kinds_before(kinds: int, kind_of_layer: Sequence[int]) -> Floats:
    """Return the number of layers of each kind before layer i, (kinds, layers + 1)."""
    counts = np.zeros((kinds, len(kind_of_layer) + 1))
    np.cumsum(np.eye(kinds)[:, list(kind_of_layer)], axis=1, out=counts[:, 1:])
    return counts
