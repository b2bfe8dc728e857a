"""Every layout that there is for a job, but for what is recomputed and offloaded: the rows a search starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kumi.errors import LayoutError
from kumi.plan.layout_batch import CHOICES, Bools, Ints, LayoutBatch, batch_layouts, concat_layouts
from kumi.spec.checks import divisors, rules
from kumi.spec.job import Job
from kumi.spec.ledger import kind_ops
from kumi.spec.model import ModelSpec
from kumi.spec.schedules import DEFAULT, FORWARDS_FIRST, SCHEDULES
from kumi.spec.schedules.schedule_record import Schedule

OUTER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# More devices than anyone has, and with them millions of ways to be divided.
MOST_DEVICES = 1 << 20

# Rows that are looked at in one go.
CHUNK = 1 << 16

# What a run file pins of the layout, by the field's name.
Pins = Mapping[str, Any]


def bases(job: Job, pinned: Pins) -> LayoutBatch:
    """All legal layouts of `job` that agree with `pinned`, with nothing recomputed and nothing offloaded.

    What pins keep out is not built, so that a search with everything pinned takes no time. Tensor parallelism comes
    with sequence parallelism, which needs less memory for as many bytes sent, and context parallelism with the ring,
    which works with any number of heads, unless they are pinned otherwise.
    """
    found = [chunk for _, chunk in chunks(job, pinned, CHUNK)]
    return concat_layouts(found) if found else batch_layouts([])


def chunks(job: Job, pinned: Pins, most: int) -> Iterator[tuple[float, LayoutBatch]]:
    """`bases`, at most `most` rows at a time, with the share of the arrangements that are done then.

    Devices and batches with many divisors have more layouts than should be held at once. Raises LayoutError where there
    are more than `MOST_DEVICES`.
    """
    if job.cluster.devices > MOST_DEVICES:
        raise LayoutError(
            f"the cluster has {job.cluster.devices} devices, and layouts are searched for {MOST_DEVICES} at most; "
            f"use fewer cluster.nodes"
        )
    experts, parts, rows = expert_counts(job.model), [], 0
    every = list(meshes(job.cluster.devices, pinned))
    for number, degrees in enumerate(every, 1):
        mesh = dict(zip(OUTER, degrees, strict=True))
        parts.append(_grid(mesh, _inner(job, mesh, experts, pinned)))
        rows += len(parts[-1]["pp"])
        if rows >= 4 * most or number == len(every):
            legal_ones = _legal(job, parts)
            for start in range(0, len(legal_ones), most):
                yield number / len(every), legal_ones.take(slice(start, start + most))
            parts, rows = [], 0


def _legal(job: Job, parts: list[dict[str, Ints]]) -> LayoutBatch:
    """The legal rows of `parts`, with nothing recomputed and nothing offloaded."""
    named = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    rows = len(named["pp"])
    plain = {
        "recompute": np.zeros(rows, np.int64),
        "offload": np.zeros(rows, np.int64),
        "recompute_layers": np.full(rows, -1),
    }
    found = LayoutBatch(**named, **plain)
    return found.take(legal(job, found))


def legal(job: Job, x: LayoutBatch) -> Bools:
    """Return whether each row of `x` keeps all rules of `kumi.spec.checks`, (rows,)."""
    result = np.zeros(len(x), np.bool_)
    rows, legal_rows = np.arange(len(x)), np.ones(len(x), np.bool_)
    # What a degree of 0 divides is of no account: its row is illegal.
    with np.errstate(divide="ignore"):
        for rule in rules(job.model, job.cluster, job.batch):
            legal_rows &= rule.holds(x)
            if 2 * np.count_nonzero(legal_rows) < len(x):  # so few that copying them costs less than to go on
                rows, x = rows[legal_rows], x.take(legal_rows)
                legal_rows = np.ones(len(x), np.bool_)
    result[rows[legal_rows]] = True
    return result


def expert_counts(model: ModelSpec) -> set[int]:
    """How many routed experts the layers of `model` have; empty where none has any."""
    return {op.experts for ops in kind_ops(model) for op in ops} - {0}


def meshes(devices: int, pinned: Pins) -> Iterator[tuple[int, ...]]:
    """Every way to write `devices` as a product of the degrees in `OUTER` that agrees with `pinned`."""
    yield from _factors(devices, [pinned.get(axis) for axis in OUTER])


def _factors(number: int, fixed: list[int | None]) -> Iterator[tuple[int, ...]]:
    first, *rest = fixed
    for degree in divisors(number) if first is None else [first] if number % first == 0 else []:
        if rest:
            yield from ((degree, *others) for others in _factors(number // degree, rest))
        elif degree == number:
            yield (degree,)


def _inner(job: Job, mesh: dict[str, int], experts: set[int], pinned: Pins) -> dict[str, Any]:
    """Values of the other fields where the axes are `mesh`; what is illegal in combination is left out later."""
    ranks, tp = mesh["dp_shard"] * mesh["cp"] * mesh["tp"], mesh["tp"]
    each = max(1, job.batch.sequences // (mesh["dp_replicate"] * mesh["dp_shard"]))
    free = {
        "ep": [ep for ep in divisors(ranks) if all(count % ep == 0 for count in experts)] if experts else [1],
        "expert_tp": [1, tp] if experts and tp > 1 else [1],
        "zero": _zero(mesh),
        "microbatch": divisors(each),
        "sequence_parallel": [1],
        "context": [0],
        "tiles": [1],
    }
    chosen: dict[str, Any] = {name: _pinned(name, values, pinned) for name, values in free.items()}
    return chosen | {"schedule+stages": _schedules(job.model, mesh["pp"], pinned)}


def _zero(mesh: dict[str, int]) -> list[int]:
    """The ZeRO stages where the axes are `mesh`: context-parallel ranks hold the same and can divide it, too."""
    if mesh["dp_shard"] > 1:
        return [1, 2, 3]
    return [0, 1, 2, 3] if mesh["cp"] > 1 else [0]


def _schedules(model: ModelSpec, pp: int, pinned: Pins) -> list[tuple[int, int]]:
    """(number of the schedule, stages of a rank): every number of stages that leaves each of them a layer, where the
    schedule takes more than one number."""
    if pp == 1:
        pairs = [(DEFAULT, 1)]
    else:
        # With all forwards first a step takes as long as in 1F1B and keeps more: looked at where it is pinned.
        names = [name for name in SCHEDULES if name not in FORWARDS_FIRST or name == pinned.get("schedule")]
        # Of rows that are equally fast the first is taken: that of a schedule that takes one number of stages.
        names.sort(key=lambda name: SCHEDULES[name].more_stages)
        most = (model.num_hidden_layers + 2) // pp
        pairs = [(name, stages) for name in names for stages in _stages(SCHEDULES[name], most)]
    allowed = [
        pair
        for pair in pairs
        if all(pinned.get(name, value) == value for name, value in zip(("schedule", "stages"), pair, strict=True))
    ]
    return [(CHOICES["schedule"].index(name), stages) for name, stages in allowed]


def _stages(schedule: Schedule, most: int) -> Sequence[int]:
    """The numbers of stages that a rank may hold, `most` at most where there is a choice."""
    return range(schedule.stages, most + 1) if schedule.more_stages else (schedule.stages,)


def _pinned(name: str, values: list[int], pinned: Pins) -> list[int]:
    """`values`, or the one that is pinned."""
    if name not in pinned:
        return values
    return [CHOICES[name].index(pinned[name]) if name in CHOICES else int(pinned[name])]


def _grid(mesh: dict[str, int], inner: dict[str, Any]) -> dict[str, Ints]:
    """All combinations of `inner` in one arrangement of the axes, as columns."""
    pairs = np.array(inner.pop("schedule+stages"), np.int64).reshape(-1, 2)
    grid = np.meshgrid(*(np.array(values, np.int64) for values in inner.values()), np.arange(len(pairs)), indexing="ij")
    rows = grid[0].size
    found = {name: np.full(rows, degree, np.int64) for name, degree in mesh.items()}
    found |= {name: column.ravel() for name, column in zip(inner, grid, strict=False)}
    picked = pairs[grid[-1].ravel()]
    return found | {"schedule": picked[:, 0], "stages": picked[:, 1]}
