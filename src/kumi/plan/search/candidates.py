"""All legal layouts of a job, before recomputation and offloading are chosen: the layouts that a search starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kumi.errors import LayoutError
from kumi.plan.layout_batch import CHOICES, Bools, Ints, LayoutBatch, batch_layouts, concat_layouts
from kumi.spec.divisibility import divisors
from kumi.spec.job import Job
from kumi.spec.layout_rules import layout_rules
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.model import ModelSpec
from kumi.spec.schedules import DEFAULT, FORWARDS_FIRST, SCHEDULES
from kumi.spec.schedules.schedule_record import Schedule

_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# More devices than any cluster has. A larger number could be divided in millions of ways.
_MAX_DEVICES = 1 << 20

# Rows (layouts) that the search evaluates at once. With fewer, calls of functions take longer than their arithmetic;
# with more, arrays leave the processor's cache, and a worker takes more memory.
CHUNK_ROWS = 1 << 16

# The pinned fields of the layout, which the user has fixed: name -> value.
Pins = Mapping[str, Any]


def layout_grid(job: Job, pinned: Pins) -> LayoutBatch:
    """Return all legal layouts of `job` that agree with `pinned`, without recomputation and offloading.

    Only rows that agree with the pins are built, so a search with everything pinned is immediate. Unless pinned, tensor
    parallelism comes with sequence parallelism, which needs less memory for the same traffic, and context parallelism
    with ring attention, which works with any number of heads.
    """
    chunks = [chunk for _, chunk in layout_chunks(job, pinned, CHUNK_ROWS)]
    return concat_layouts(chunks) if chunks else batch_layouts([])


def layout_chunks(job: Job, pinned: Pins, max_rows: int) -> Iterator[tuple[float, LayoutBatch]]:
    """Yield (fraction of the work done, next layouts of `layout_grid`), at most `max_rows` layouts at a time.

    Numbers of devices and sequences with many divisors have too many layouts to hold at once.

    Raise LayoutError if the cluster has more than `_MAX_DEVICES`.
    """
    groups = grid_groups(job, pinned, max_rows)
    rows = sum(group.rows for group in groups)
    done = 0
    for group in groups:
        done += group.rows
        for chunk in legal_chunks(job, group, max_rows):
            yield done / max(1, rows), chunk


class GridGroup(NamedTuple):
    """Grids of layouts, legal or not, that are built together.

    `grids`: for each grid, its degrees of `_AXES`, and the lists of values of the other fields.
    `rows`: the number of layouts.
    """

    grids: tuple[tuple[dict[str, int], dict[str, Any]], ...]
    rows: int


def grid_groups(job: Job, pinned: Pins, max_rows: int) -> list[GridGroup]:
    """Return the grids of all layouts of `job` that agree with `pinned`, in groups of at least `max_rows`.

    The last group is smaller. Raise LayoutError if the cluster has more than `_MAX_DEVICES`.
    """
    if job.cluster.devices > _MAX_DEVICES:
        raise LayoutError(
            f"the cluster has {job.cluster.devices} devices, and a search takes at most {_MAX_DEVICES}; "
            f"use fewer cluster.nodes"
        )
    experts, schedules = _expert_counts(job.model), dict[int, list[tuple[int, int]]]()
    groups, grids, rows = list[GridGroup](), list[tuple[dict[str, int], dict[str, Any]]](), 0
    for degrees in _meshes(job.cluster.devices, pinned):
        mesh = dict(zip(_AXES, degrees, strict=True))
        if mesh["pp"] not in schedules:
            schedules[mesh["pp"]] = _schedules(job.model, mesh["pp"], pinned)
        values = _inner_values(job, mesh, experts, pinned) | {"schedule+stages": schedules[mesh["pp"]]}
        grids.append((mesh, values))
        rows += prod(map(len, values.values()))
        if rows >= max_rows:
            groups.append(GridGroup(tuple(grids), rows))
            grids, rows = [], 0
    return [*groups, GridGroup(tuple(grids), rows)] if grids else groups


def legal_chunks(job: Job, group: GridGroup, max_rows: int) -> Iterator[LayoutBatch]:
    """Yield the legal layouts of `group`, without recomputation and offloading, at most `max_rows` at a time."""
    grids = [_grid(mesh, dict(values)) for mesh, values in group.grids]
    combined = {name: np.concatenate([grid[name] for grid in grids]) for name in grids[0]}
    rows = len(combined["pp"])
    layouts = LayoutBatch(
        **combined,
        recompute=np.zeros(rows, np.int64),
        offload=np.zeros(rows, np.int64),
        recompute_layers=np.full(rows, -1),
    )
    legal = layouts.take(legal_mask(job, layouts))
    for start in range(0, len(legal), max_rows):
        yield legal.take(slice(start, start + max_rows))


def legal_mask(job: Job, layouts: LayoutBatch) -> Bools:
    """Return whether each row satisfies all rules of `kumi.spec.layout_rules`, (rows,)."""
    result = np.zeros(len(layouts), np.bool_)
    rows, legal = np.arange(len(layouts)), np.ones(len(layouts), np.bool_)
    # A degree of 0 makes a row illegal, so the results of dividing by it are never used.
    with np.errstate(divide="ignore"):
        for rule in layout_rules(job.model, job.cluster, job.batch):
            legal &= rule.holds(layouts)
            if 2 * np.count_nonzero(legal) < len(layouts):  # copying the few remaining rows is cheaper than all of them
                rows, layouts = rows[legal], layouts.take(legal)
                legal = np.ones(len(layouts), np.bool_)
    result[rows[legal]] = True
    return result


def _expert_counts(model: ModelSpec) -> set[int]:
    """Return the numbers of routed experts that layers of `model` have; empty for a dense model."""
    return {op.experts for ops in unique_layer_ops(model) for op in ops} - {0}


def _meshes(devices: int, pinned: Pins) -> Iterator[tuple[int, ...]]:
    """Yield the degrees of `_AXES` that multiply to `devices` and agree with `pinned`."""
    yield from _factors(devices, [pinned.get(axis) for axis in _AXES])


def _factors(number: int, fixed: list[int | None]) -> Iterator[tuple[int, ...]]:
    """Yield all factorizations of `number` into len(`fixed`) factors, each of them fixed or (None) free."""
    first, *rest = fixed
    for degree in divisors(number) if first is None else [first] if number % first == 0 else []:
        if rest:
            yield from ((degree, *others) for others in _factors(number // degree, rest))
        elif degree == number:
            yield (degree,)


def _inner_values(job: Job, mesh: dict[str, int], experts: set[int], pinned: Pins) -> dict[str, Any]:
    """Return the values to try of fields other than degrees and schedules, for the degrees in `mesh`.

    Illegal combinations are removed later.
    """
    ranks, tp = mesh["dp_shard"] * mesh["cp"] * mesh["tp"], mesh["tp"]
    sequences = max(1, job.batch.sequences // (mesh["dp_replicate"] * mesh["dp_shard"]))
    free = {
        "ep": [ep for ep in divisors(ranks) if all(count % ep == 0 for count in experts)] if experts else [1],
        "expert_tp": [1, tp] if experts and tp > 1 else [1],
        "zero": _zero_stages(mesh),
        "microbatch": divisors(sequences),
        "sequence_parallel": [1],
        "context": [0],
        "tiles": [1],
    }
    return {name: _unless_pinned(name, choices, pinned) for name, choices in free.items()}


def _zero_stages(mesh: dict[str, int]) -> list[int]:
    """Return the ZeRO stages for the degrees in `mesh`; states are sharded over cp ranks, too."""
    if mesh["dp_shard"] > 1:
        return [1, 2, 3]
    return [0, 1, 2, 3] if mesh["cp"] > 1 else [0]


def _schedules(model: ModelSpec, pp: int, pinned: Pins) -> list[tuple[int, int]]:
    """Return (index of the schedule, stages per rank) of all schedules.

    If a schedule allows several numbers of stages, return all that leave at least one layer per inner stage.
    """
    if pp == 1:
        pairs = [(DEFAULT, 1)]
    else:
        # A schedule with all forwards first is as fast as 1F1B and needs more memory: include it only if pinned.
        names = [name for name in SCHEDULES if name not in FORWARDS_FIRST or name == pinned.get("schedule")]
        # The search takes the first of equally fast rows: prefer schedules with a fixed number of stages.
        names.sort(key=lambda name: SCHEDULES[name].more_stages)
        most = (model.num_hidden_layers + 2) // pp
        pairs = [(name, stages) for name in names for stages in _stages_per_rank(SCHEDULES[name], most)]
    allowed = [
        pair
        for pair in pairs
        if all(pinned.get(name, value) == value for name, value in zip(("schedule", "stages"), pair, strict=True))
    ]
    return [(CHOICES["schedule"].index(name), stages) for name, stages in allowed]


def _stages_per_rank(schedule: Schedule, most: int) -> Sequence[int]:
    """Return the numbers of stages that a rank may hold, at most `most` if the schedule allows several."""
    return range(schedule.stages, most + 1) if schedule.more_stages else (schedule.stages,)


def _unless_pinned(name: str, values: list[int], pinned: Pins) -> list[int]:
    """Return `values`, or the pinned value."""
    if name not in pinned:
        return values
    return [CHOICES[name].index(pinned[name]) if name in CHOICES else int(pinned[name])]


def _grid(mesh: dict[str, int], inner: dict[str, Any]) -> dict[str, Ints]:
    """Return all combinations of the values in `inner` with the degrees in `mesh`, as one array per field."""
    pairs = np.array(inner.pop("schedule+stages"), np.int64).reshape(-1, 2)
    grid = np.meshgrid(*(np.array(values, np.int64) for values in inner.values()), np.arange(len(pairs)), indexing="ij")
    rows = grid[0].size
    fields = {name: np.full(rows, degree, np.int64) for name, degree in mesh.items()}
    fields |= {name: values.ravel() for name, values in zip(inner, grid, strict=False)}
    schedule, stages = pairs[grid[-1].ravel()].T
    return fields | {"schedule": schedule, "stages": stages}
