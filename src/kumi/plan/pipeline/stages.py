"""Who holds which layers: the stages of a pipeline, as even as can be or balanced by cost, and what each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kumi.plan.layout_batch import Floats, Ints, LayoutBatch
from kumi.plan.pipeline.timeline import in_flight
from kumi.spec.ledger import kind_ops
from kumi.spec.model import ModelSpec
from kumi.spec.schedule import stage_of
from kumi.spec.schedules import V_SHAPED
from kumi.spec.sharding import Unit, even_stages, rank_layers, stage_ops, units


@dataclass(frozen=True)
class Share:
    """What one pp rank of every row holds, over all its stages.

    `layers`: how many of each of `model.layer_kinds()`, (kinds, rows); `embedding` and `head`: 1 where it has them,
    else 0, (rows,); `in_flight`: for how many microbatches it keeps activations at the peak, (rows,); `last`: 1 for the
    kind of its last layer, else 0, (kinds, rows).
    """

    layers: Floats
    embedding: Floats
    head: Floats
    in_flight: Floats
    last: Floats

    def take(self, index: Ints) -> Share:
        """The rows numbered `index`."""
        ends = self.embedding[index], self.head[index], self.in_flight[index]
        return Share(self.layers[:, index], *ends, self.last[:, index])


def share(model: ModelSpec, x: LayoutBatch, rank: Ints, m: Ints, stage_layers: Sequence[int] = ()) -> Share:
    """What pp rank `rank` of every row holds in steps of `m` microbatches.

    Layers are divided evenly, or, where it is not empty, as `stage_layers` says, which must then fit every row.
    """
    firsts = np.concatenate([[0], np.cumsum(stage_layers)]).astype(np.int64)
    turns, last_stage = x.one_of("schedule", V_SHAPED), x.pp * x.stages - 1
    kinds, of_layer = model.layer_kinds()
    if len(kinds) == 1 and not len(stage_layers):
        layers = rank_layers(x, len(of_layer), rank)[None, :].astype(np.float64)
        last = np.minimum(layers, 1.0)
    else:
        before, kind_of = _kinds_before(len(kinds), of_layer), np.array(of_layer)
        even = even_stages(len(of_layer), last_stage + 1)
        layers, last_kind = np.zeros((len(kinds), len(x))), np.full(len(x), -1)
        for chunk in range(int(x.stages.max(initial=1))):
            stage = np.minimum(stage_of(turns, x.pp, rank, chunk), last_stage)
            if len(stage_layers):
                first, end = firsts[stage], firsts[stage + 1]
            else:
                first, end = (_first_layer(*even, at) for at in (stage, stage + 1))
            layers += np.where(chunk < x.stages, before[:, end] - before[:, first], 0)
            last_kind = np.where((chunk < x.stages) & (end > first), kind_of[end - 1], last_kind)
        last = (last_kind == np.arange(len(kinds))[:, None]).astype(np.float64)
    head = np.where(turns, rank == 0, rank == x.pp - 1)
    return Share(
        layers,
        (rank == 0).astype(np.float64),
        head.astype(np.float64),
        in_flight(x.schedule, x.pp, x.stages, m, rank),
        last,
    )


def end_units(model: ModelSpec, share: Share) -> list[tuple[Unit, Floats]]:
    """The FSDP units of the embedding and of the head, and 1 for every row that has them, else 0."""
    first, last = share.embedding, share.head
    has = {(True, True): first * last, (True, False): first * (1 - last), (False, True): last * (1 - first)}
    return [(unit, np.asarray(sum(has[stage] for stage in stages))) for unit, stages in _units_of_ends(model)]


@lru_cache(maxsize=64)
def _units_of_ends(model: ModelSpec) -> tuple[tuple[Unit, tuple[tuple[bool, bool], ...]], ...]:
    """The different FSDP units of the embedding and of the head, each with the stages that have it: whether these have
    the embedding, and the head."""
    stages_of: dict[Unit, list[tuple[bool, bool]]] = {}
    for embedding, head in ((True, True), (True, False), (False, True)):
        for unit in units(stage_ops(model, (), embedding=embedding, head=head)):
            stages_of.setdefault(unit, []).append((embedding, head))
    return tuple((unit, tuple(stages)) for unit, stages in stages_of.items())


def even_first(layers: int, stages: Ints, stage: Ints) -> Ints:
    """The first layer of `stage` when `layers` are divided evenly over `stages` (see `kumi.spec.sharding.even_stages`);
    for stage = stages, one past the last."""
    return _first_layer(*even_stages(layers, stages), stage)


def _first_layer(each: Ints, begin: Ints, end: Ints, stage: Ints) -> Ints:
    """The same of stages that have `each` layers, and one more from `begin` to `end`."""
    return each * stage + np.maximum(np.minimum(stage, end) - begin, 0)


@lru_cache(maxsize=64)
def before_largest(model: ModelSpec) -> int:
    """How many layers come before the first of the kind with the most parameters."""
    sizes = [sum(param.numel for op in ops for param in op.params) for ops in kind_ops(model)]
    return model.layer_kinds()[1].index(sizes.index(max(sizes)))


def balanced(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """How many layers each of `stages` takes so that the dearest stage is as cheap as can be.

    `costs` are those of the layers, in model order; `first` and `last` come on top on the first stage (the embedding)
    and the last (the head), which may then go without layers; all others have one or more. Of the divisions with the
    cheapest dearest stage, the one whose stages' costs have the smallest sum of squares. Needs `stages` <= layers + 2.
    """
    sums = np.concatenate([[0.0], np.cumsum(costs, dtype=np.float64)])
    table = [_stage_costs(sums, number, stages, first, last) for number in range(stages)]
    dearest = _least_dearest(table)
    # A hair above it, so that no division is lost to rounding.
    return _most_even(table, dearest * (1 + 1e-12) + 1e-300)


def _stage_costs(sums: Floats, number: int, stages: int, first: float, last: float) -> Floats:
    """Costs of stage `number` with layers [i, j), (layers + 1, layers + 1); infinite where it may not hold them."""
    found = sums[None, :] - sums[:, None] + first * (number == 0) + last * (number == stages - 1)
    least = 0 if number in (0, stages - 1) else 1
    taken = np.arange(len(sums))[None, :] - np.arange(len(sums))[:, None]
    return np.where(taken >= least, found, np.inf)


def _least_dearest(table: list[Floats]) -> float:
    best = np.full(len(table[0]), np.inf)
    best[0] = 0.0
    for costs in table:
        best = np.min(np.maximum(best[:, None], costs), axis=0)
    return float(best[-1])


def _most_even(table: list[Floats], dearest: float) -> tuple[int, ...]:
    """Layers of each stage in the division with the smallest sum of squares where no stage costs more than
    `dearest`."""
    best = np.full(len(table[0]), np.inf)
    best[0] = 0.0
    origins = []
    for costs in table:
        sums = best[:, None] + np.where(costs <= dearest, costs, np.inf) ** 2
        origins.append(np.argmin(sums, axis=0))
        best = np.min(sums, axis=0)
    end, counts = len(best) - 1, []
    for origin in reversed(origins):
        counts.append(int(end - origin[end]))
        end = int(origin[end])
    return tuple(reversed(counts))


def _kinds_before(kinds: int, of_layer: Sequence[int]) -> Floats:
    """How many layers of each kind come before layer i, (kinds, layers + 1)."""
    found = np.zeros((kinds, len(of_layer) + 1))
    np.cumsum(np.eye(kinds)[:, list(of_layer)], axis=1, out=found[:, 1:])
    return found
