"""The fastest layouts that fit, out of all there are: memory first, then time, then the best of them in full."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from operator import attrgetter

import numpy as np

from kumi.plan.estimate import estimate, representative_ranks
from kumi.plan.estimates import Estimate
from kumi.plan.layout_batch import CHOICES, Floats, LayoutBatch, concat_layouts
from kumi.plan.memory import device_memory
from kumi.plan.pipeline.stages import balanced
from kumi.plan.search.candidates import CHUNK, Pins, chunks
from kumi.plan.search.fitting import NONE, Bases, Fit, Variant, bases_of, fit, picked, pinned_layers, variants
from kumi.plan.time.step_time import step_times
from kumi.plan.unique_rows import unique_rows
from kumi.spec.checks import problems
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.schedules import SCHEDULES
from kumi.spec.sharding import stage_bounds

# How many of the fastest arrangements get a full estimate at least, and of how many the neighbours are looked at.
LOOKED_AT = 8
# An arrangement is remembered while it takes no more than this many times as long as the fastest of its chunk.
WORTH = 5.0
REFINED = 3
# Estimates that are nearer than this share of each other may well be the other way round (docs/accuracy.md).
HAIR = 0.05


@dataclass(frozen=True)
class Found:
    """What a search found.

    `plans` are the fastest layouts that fit, fastest first; `pareto` those that no other beats in both time and memory,
    fastest first. `count` layouts were looked at, of which `fitting` fit and `timed` could not be told to be slower
    than another without timing them. `smallest` needs the least memory of all, whether it fits or not.
    """

    plans: tuple[Estimate, ...]
    pareto: tuple[Estimate, ...]
    count: int
    fitting: int
    timed: int
    smallest: Layout | None


def search(
    job: Job,
    pinned: Pins,
    *,
    top: int = 10,
    front: bool = True,
    accept: Callable[[Layout], bool] | None = None,
    progress: Callable[[float], None] | None = None,
) -> Found:
    """The `top` fastest layouts of `job` that agree with `pinned`, of those that `accept` takes.

    `front`: look at the front of time and memory, too. `progress` is told which part is done, 0 to 1.
    """
    best, tally = _Best(), _Tally()
    every, workers = chunks(job, pinned, CHUNK), os.cpu_count() or 1
    # Threads share the work because numpy lets go of the interpreter; results come in the order of the chunks.
    with ThreadPoolExecutor(max_workers=workers) as pool:
        while some := list(islice(every, 2 * workers)):
            for faster, counted in pool.map(partial(_look, job, pinned), [chunk for _, chunk in some]):
                best.merge(faster)
                tally.merge(counted)
            if progress:
                progress(some[-1][0])
    plans = _refined(job, best.fastest(max(LOOKED_AT, top + 3), accept), pinned, accept, top)
    if not plans and tally.smallest is not None and (accept is None or accept(tally.smallest)):
        plans = _refined(job, [tally.smallest], pinned, accept, top)
    pareto = tuple(estimate(job, layout) for layout in best.front()) if front else ()
    return Found(plans, pareto, tally.count, tally.fitting, tally.timed, tally.smallest)


def _look(job: Job, pinned: Pins, chunk: LayoutBatch) -> tuple[_Best, _Tally]:
    """What is best of `chunk`."""
    best, tally = _Best(), _Tally()
    found = list(_candidates(bases_of(job, chunk), pinned, tally))
    if found:
        rows, peak = concat_layouts([rows for rows, _ in found]), np.concatenate([peak for _, peak in found])
        tally.timed += len(rows)
        best.add(rows, step_times(job, rows, *representative_ranks(job.model, rows)).seconds, peak)
    return best, tally


def _candidates(rows: Bases, pinned: Pins, tally: _Tally) -> Iterator[tuple[LayoutBatch, Floats]]:
    """What must be timed of every base, with its peak bytes: of each way to recompute and offload the one that fits
    and recomputes least. A base that fits as it is has no faster variant."""
    capacity = device_memory.usable_memory(rows.job.cluster.device)
    done = np.zeros(len(rows.x), np.bool_)
    for variant in variants(rows, pinned):
        found = fit(rows, variant, capacity)
        tally.add(rows.x, variant, found)
        index = np.flatnonzero(found.fits & ~done)
        if len(index):
            yield picked(rows, variant, found, index), found.peak[index]
        if variant.recompute == NONE:
            # What is offloaded later, or recomputed besides, only adds to the time.
            done = done | (found.fits & (variant.offload == NONE))


def smallest(job: Job, pinned: Pins) -> Estimate | None:
    """The layout that needs the least memory, whether it fits or not; None where none is legal."""
    tally = _Tally()
    for _, chunk in chunks(job, pinned, CHUNK):
        rows = bases_of(job, chunk)
        for variant in variants(rows, pinned):
            tally.add(chunk, variant, fit(rows, variant, device_memory.usable_memory(job.cluster.device)))
    return None if tally.smallest is None else estimate(job, tally.smallest)


class _Tally:
    """How many layouts were looked at, how many fit and were timed, and which needs the least memory."""

    def __init__(self) -> None:
        self.count = self.fitting = self.timed = 0
        self.smallest: Layout | None = None
        self.least = np.inf

    def add(self, x: LayoutBatch, variant: Variant, found: Fit) -> None:
        self.count += found.count
        self.fitting += found.fitting
        index = int(np.argmin(found.least))
        if found.least[index] < self.least:
            self.least = float(found.least[index])
            words = {name: CHOICES[name][getattr(variant, name)] for name in ("recompute", "offload")}
            layers = None if variant.layers in (None, -1) else variant.layers
            self.smallest = replace(x.row(index), recompute_layers=layers, **words)

    def merge(self, other: _Tally) -> None:
        self.count, self.fitting = self.count + other.count, self.fitting + other.fitting
        self.timed += other.timed
        if other.least < self.least:
            self.least, self.smallest = other.least, other.smallest


class _Best:
    """The fastest row of every arrangement so far, and the front of time and memory."""

    def __init__(self) -> None:
        self.rows: dict[tuple[object, ...], tuple[float, Layout]] = {}
        self.on_front: list[tuple[float, float, Layout]] = []

    def add(self, x: LayoutBatch, seconds: Floats, peak: Floats) -> None:
        """Takes in rows that take `seconds` and `peak` bytes. Ties go to the row that came first."""
        order = np.argsort(seconds, kind="stable")
        apart = [(getattr(x, name)[order] > 1).astype(np.int64) for name in ("cp", "dp_replicate", "dp_shard")]
        firsts, _ = unique_rows(*(getattr(x, name)[order] for name in KEPT), *apart)
        worth = seconds[order[np.sort(firsts)]] <= WORTH * seconds[order[0]]
        for index in order[np.sort(firsts)][worth]:
            self._keep(float(seconds[index]), x.row(int(index)))
        falling = np.minimum.accumulate(peak[order])
        on_front = order[np.flatnonzero(np.diff(falling, prepend=np.inf) < 0)]
        self._spread([(float(seconds[i]), float(peak[i]), x.row(int(i))) for i in on_front])

    def merge(self, other: _Best) -> None:
        for name, (seconds, layout) in other.rows.items():
            known = self.rows.get(name)
            if known is None or seconds < known[0]:
                self.rows[name] = seconds, layout
        self._spread(other.on_front)

    def _keep(self, seconds: float, layout: Layout) -> None:
        name = arrangement(layout)
        known = self.rows.get(name)
        if known is None or seconds < known[0]:
            self.rows[name] = seconds, layout

    def _spread(self, found: list[tuple[float, float, Layout]]) -> None:
        """Adds to the front what is on it, and takes away what no longer is."""
        rows, self.on_front, least = sorted(self.on_front + found, key=lambda row: row[:2]), [], np.inf
        for row in rows:
            if row[1] < least:
                self.on_front, least = [*self.on_front, row], row[1]

    def fastest(self, count: int, accept: Callable[[Layout], bool] | None) -> list[Layout]:
        """The `count` fastest that `accept` takes, one an arrangement: of what is equally fast the simplest; and beyond
        these the `REFINED` simplest of those that are as fast as the fastest."""
        found: dict[object, list[tuple[float, Layout]]] = {}
        for seconds, layout in sorted(self.rows.values(), key=lambda row: row[0]):
            alike = found.setdefault(_SHOWN(layout), [])
            if not alike or seconds <= (1 + HAIR) * alike[0][0]:
                # Not everyone can recompute in some layers only; in all of them it fits as well.
                whole = replace(layout, recompute_layers=None)
                alike += [(seconds, one) for one in (layout, whole) if accept is None or accept(one)][:1]
        groups = [min(alike, key=lambda row: (effort(row[1]), row[0])) for alike in found.values() if alike]
        near = [row for row in groups[count:] if row[0] <= (1 + HAIR) * groups[0][0]]
        near.sort(key=lambda row: (effort(row[1]), row[0]))
        return [layout for _, layout in (*groups[:count], *near[:REFINED])]

    def front(self, most: int = 6) -> list[Layout]:
        """At most `most` of the front, evenly spread."""
        pick = np.unique(np.linspace(0, len(self.on_front) - 1, min(most, len(self.on_front))).round().astype(int))
        return [self.on_front[index][2] for index in pick]


# Layouts that agree in `ARRANGEMENT` are variants of one another, of which one is shown. The best of what differs in
# `KEPT` and in which axes there are is kept besides, since not everyone takes each.
ARRANGEMENT = ("pp", "tp", "ep", "zero", "offload")
KEPT = (*ARRANGEMENT, "schedule", "recompute", "expert_tp")
_KEPT, _SHOWN = attrgetter(*KEPT), attrgetter(*ARRANGEMENT)


def arrangement(layout: Layout) -> tuple[object, ...]:
    """What is kept apart of layouts that differ in numbers only: not everyone takes each."""
    return (_KEPT(layout), layout.cp > 1, layout.dp_replicate > 1, layout.dp_shard > 1)


def _refined(
    job: Job, layouts: Sequence[Layout], pinned: Pins, accept: Callable[[Layout], bool] | None, top: int
) -> tuple[Estimate, ...]:
    """Full estimates of `layouts`, with their pipelines simulated; of the fastest few also of what is next to them.

    Of those that are equally fast as far as the model can tell, the simplest comes first.
    """
    fitting = [one for one in (_fitted(job, layout, pinned) for layout in layouts) if one.fits]
    fitting.sort(key=lambda one: one.step_seconds)
    for place, plain in enumerate(fitting[:REFINED]):
        nearby = _neighbours(job, plain, pinned)
        legal = [one for one in nearby if (accept is None or accept(one)) and not _problems(job, one)]
        made = [one for one in (estimate(job, layout) for layout in legal) if one.fits]
        fitting[place] = min([plain, *made], key=lambda one: one.step_seconds)
    if not fitting:
        return ()
    least = min(one.step_seconds for one in fitting)
    hair = [one for one in fitting if one.step_seconds <= (1 + HAIR) * least]
    best = min(hair, key=lambda one: (effort(one.layout), one.step_seconds))
    rest = sorted((one for one in fitting if one is not best), key=lambda one: one.step_seconds)
    return (best, *rest)[:top]


def _fitted(job: Job, layout: Layout, pinned: Pins) -> Estimate:
    """The estimate of `layout`, or where that does not fit, as sums of parts had said, of the same with as few more
    layers recomputed as make it fit."""
    one = estimate(job, layout)
    if one.fits or layout.recompute_layers is None or pinned_layers(pinned) is not None:
        return one
    low, high = layout.recompute_layers + 1, _most_layers(job, layout)
    one = estimate(job, replace(layout, recompute_layers=None))
    while one.fits and low < high:
        middle = (low + high) // 2
        fewer = estimate(job, replace(layout, recompute_layers=middle))
        low, high, one = (low, middle, fewer) if fewer.fits else (middle + 1, high, one)
    return one


def _most_layers(job: Job, layout: Layout) -> int:
    """Layers of the pp rank that has most of them."""
    return max(last - first for first, last in stage_bounds(layout, job.model.num_hidden_layers)) * layout.stages


def _problems(job: Job, layout: Layout) -> list[str]:
    return problems(job.model, layout, job.cluster, job.batch)


def effort(layout: Layout) -> int:
    """How many techniques `layout` takes to run: what is equally fast is better simple. Offloading counts twice, as it
    leans on host and bus, which others use, too, and so do schedules that few trainers have."""
    used = (
        layout.pp > 1,
        layout.cp > 1,
        layout.tp > 1,
        layout.ep > 1,
        layout.offload != "none",
        layout.dp_replicate > 1 and layout.dp_shard > 1,
        layout.recompute != "none",
    )
    rare = (layout.offload != "none", not SCHEDULES[layout.schedule].common)
    return 4 * sum((*used, *rare)) + layout.zero + (layout.stages > 1) + bool(layout.stage_layers)


def _neighbours(job: Job, plain: Estimate, pinned: Pins) -> Iterator[Layout]:
    """Layouts that differ from `plain` in what the search leaves out or takes from a bound: stages balanced by cost,
    tensor parallelism without its sequence part, and a layer less recomputed."""
    layout = plain.layout
    uneven = _balanced(job, plain) if "stage_layers" not in pinned else None
    if uneven:
        yield uneven
    if layout.tp > 1 and "sequence_parallel" not in pinned:
        yield replace(layout, sequence_parallel=False)
    if layout.recompute != "none" and pinned_layers(pinned) is None:
        most = _most_layers(job, layout)
        for fewer in range(1, 4):
            if (layout.recompute_layers or most) > fewer:
                yield replace(layout, recompute_layers=(layout.recompute_layers or most) - fewer)


def _balanced(job: Job, plain: Estimate) -> Layout | None:
    """The layout of `plain` with stages as equal in time as can be; None where they are so already."""
    layout, layers = plain.layout, job.model.num_hidden_layers
    count = layout.pp * layout.stages
    if count == 1 or count > layers:
        return None
    seconds = [stage.forward + stage.backward_input + stage.backward_weight for stage in plain.stages]
    sizes = [max(1, stage.last - stage.first) for stage in plain.stages]
    each = min(second / size for second, size in zip(seconds, sizes, strict=True))
    first, last = (
        max(0.0, seconds[end] - each * (plain.stages[end].last - plain.stages[end].first)) for end in (0, -1)
    )
    sizes = list(balanced([each] * layers, count, first, last))
    if sizes == [end - begin for begin, end in stage_bounds(layout, job.model.num_hidden_layers)]:
        return None
    return replace(layout, stage_layers=tuple(sizes))
