"""The search for the fastest layouts that fit: memory of all candidates, then time, then full estimates of the best."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kumi.plan.estimate import estimate, estimate_for_search, representative_ranks, with_collectives
from kumi.plan.estimates import Estimate
from kumi.plan.layout_batch import CHOICES, Bools, Floats, LayoutBatch, concat_layouts
from kumi.plan.memory import device_memory
from kumi.plan.pipeline.stages import balance_stages
from kumi.plan.row_cache import SearchCaches
from kumi.plan.search.candidates import CHUNK_ROWS, GridGroup, Pins, grid_groups, layout_chunks, legal_chunks
from kumi.plan.search.fitting import (
    NO_OFFLOAD,
    NO_RECOMPUTE,
    Candidates,
    Fit,
    Variant,
    apply_variant,
    fit_variant,
    make_candidates,
    pinned_recompute_layers,
    variants,
)
from kumi.plan.search.ranking import TIE_TOLERANCE, cautious_seconds, complexity, rank_plans
from kumi.plan.search.workers import start_workers
from kumi.plan.time.layer_costs import cost_table
from kumi.plan.time.least_time import least_step_seconds
from kumi.plan.time.step_time import step_times
from kumi.plan.unique_rows import unique_rows
from kumi.process_limits import usable_cores
from kumi.spec.checks import illegal
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.sharding import stage_bounds

# Returns whether a layout may be planned. Functions that get None instead plan any layout.
AcceptFn = Callable[[Layout], bool]

# At least this many of the fastest combinations of `_SHOWN_FIELDS` get a full estimate.
_ESTIMATED = 8
# Of so many of the fastest plans, the neighbours are estimated as well.
_REFINED = 3
# Layouts slower than the fastest by more than this factor are dropped.
_KEPT_FACTOR = 5.0

# The search shows one plan for each combination of `_SHOWN_FIELDS`. It keeps the best layout for each arrangement, a
# combination of `_RANKED_FIELDS` and of the axes in use, since a trainer may not support all of them.
_SHOWN_FIELDS = ("pp", "tp", "ep", "zero", "offload")
_RANKED_FIELDS = (*_SHOWN_FIELDS, "schedule", "recompute", "expert_tp")
# An arrangement: the values of `_RANKED_FIELDS`, and whether cp, dp_replicate and dp_shard are in use.
_Key = tuple[tuple[Any, ...], bool, bool, bool]
_shown_key, _ranked_values = attrgetter(*_SHOWN_FIELDS), attrgetter(*_RANKED_FIELDS)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    `plans`: the fastest layouts that fit, fastest first.
    `pareto`: at most six of the layouts that no other one beats in both time and memory, fastest first; empty if the
        search leaves the front out.
    `count`, `fitting`: the number of layouts considered, and of those that fit.
    `timed`: the number of layouts whose time was computed, because no bound rules them out; it depends on
        the number of workers.
    `smallest`: the layout with the least memory, whether it fits or not; None if no layout is legal, or if the hosts
        are too small for the pinned offloading.
    """

    plans: tuple[Estimate, ...]
    pareto: tuple[Estimate, ...]
    count: int
    fitting: int
    timed: int = field(compare=False)
    smallest: Layout | None


def search(
    job: Job,
    pinned: Pins,
    *,
    top: int = 10,
    front: bool = True,
    accept: AcceptFn | None = None,
    progress: Callable[[float], None] | None = None,
    bounds: bool = True,
) -> SearchResult:
    """Return the `top` fastest layouts of `job` that fit, agree with `pinned` and are accepted by `accept`.

    `front`: include the Pareto front of time and memory.
    `progress`: called with the fraction done, 0 to 1.
    `bounds`: leave out layouts that a lower bound of their time proves to be too slow for the result.

    Whether a layout fits is decided for every legal layout.
    """
    count, accept = max(_ESTIMATED, top + 3), accept and lru_cache(maxsize=None)(accept)
    best, tally = _Best(with_front=front), _Tally()
    groups, done = grid_groups(job, pinned, CHUNK_ROWS), 0
    total = sum(group.rows for group in groups)
    caches = SearchCaches()
    task = partial(search_group, job, dict(pinned), CHUNK_ROWS, caches)
    with start_workers(task, min(usable_cores(), len(groups)), total) as (submit, workers):
        # Results are merged in the order of the groups, whichever is ready first. A group is searched with bounds from
        # the groups that are merged so far: all before it but those that workers still search, at most `window`.
        window, working = 2 * workers, deque[tuple[GridGroup, Future[tuple[_Best, _Tally]]]]()
        remaining = iter(groups)
        while True:
            rivals = best.rivals(count, accept) if bounds and tally.count else None
            for group in islice(remaining, window - len(working)):
                working.append((group, submit(rivals, group)))
            if not working:
                break
            group, result = working.popleft()
            group_best, group_tally = result.result()
            best.merge(group_best)
            tally.merge(group_tally)
            done += group.rows
            if progress:
                progress(done / max(1, total))
    plans = _refine(job, best.fastest(count, accept), pinned, accept, top, caches)
    if not plans and tally.smallest is not None and (accept is None or accept(tally.smallest)):
        plans = _refine(job, [tally.smallest], pinned, accept, top, caches)
    pareto = tuple(estimate(job, layout) for layout in best.front()) if front else ()
    return SearchResult(plans, pareto, tally.count, tally.fitting, tally.timed, tally.smallest)


def search_group(
    job: Job, pinned: Pins, max_rows: int, caches: SearchCaches, rivals: _Rivals | None, group: GridGroup
) -> tuple[_Best, _Tally]:
    """Return the best layouts of `group`, without those that lose against `rivals`, and the counts.

    At most `max_rows` layouts are evaluated at a time. `caches`: the worker's caches, which all of its groups share.
    """
    best, tally = _Best(), _Tally()
    for chunk in legal_chunks(job, group, max_rows):
        _search_chunk(job, pinned, caches, rivals, chunk, best, tally)
    return best, tally


def _search_chunk(
    job: Job, pinned: Pins, caches: SearchCaches, rivals: _Rivals | None, chunk: LayoutBatch, best: _Best, tally: _Tally
) -> None:
    """Add the layouts of `chunk` to `best`, without those that lose against `rivals`, and to `tally`."""
    parts = list(_layouts_to_time(make_candidates(job, chunk, caches), pinned, tally))
    if not parts:
        return
    layouts, peak = concat_layouts([layouts for layouts, _ in parts]), np.concatenate([peak for _, peak in parts])
    ranks, (table, costs) = representative_ranks(job.model, layouts), cost_table(job, layouts, caches.costs)
    if rivals is not None and np.isfinite(rivals.limit):
        least = least_step_seconds(job, layouts, *ranks, (table, costs))
        index = np.flatnonzero(rivals.may_win(least, peak))
        layouts, peak, costs = layouts.take(index), peak[index], costs[index]
        ranks = ranks[0][:, index], ranks[1][:, index]
    if len(layouts):
        tally.timed += len(layouts)
        best.add(layouts, step_times(job, layouts, *ranks, costs=(table, costs)).seconds, peak, rivals)


def _layouts_to_time(candidates: Candidates, pinned: Pins, tally: _Tally) -> Iterator[tuple[LayoutBatch, Floats]]:
    """Yield the layouts that may be the fastest, with their peak bytes.

    For each candidate and each variant, it is the layout that fits with the fewest recomputed layers. A candidate that
    fits without recomputation and offloading has no faster variant.
    """
    capacity = device_memory.usable_memory(candidates.job)
    done = np.zeros(len(candidates.layouts), np.bool_)
    for variant in variants(candidates, pinned):
        fit = fit_variant(candidates, variant, capacity)
        tally.add(candidates.layouts, variant, fit)
        index = np.flatnonzero(fit.fits & ~done)
        if len(index):
            yield apply_variant(candidates, variant, fit, index), fit.peak[index]
        if variant.recompute == NO_RECOMPUTE:
            done = done | (fit.fits & (variant.offload == NO_OFFLOAD))


def estimate_smallest(job: Job, pinned: Pins) -> Estimate | None:
    """Return the estimate of the layout with the least memory; None where `SearchResult.smallest` is None."""
    tally = _Tally()
    capacity = device_memory.usable_memory(job)
    for _, chunk in layout_chunks(job, pinned, CHUNK_ROWS):
        candidates = make_candidates(job, chunk)
        for variant in variants(candidates, pinned):
            tally.add(chunk, variant, fit_variant(candidates, variant, capacity))
    return None if tally.smallest is None else estimate(job, tally.smallest)


class _Tally:
    """The numbers of layouts considered, fitting and timed, and the layout with the least memory."""

    def __init__(self) -> None:
        self.count = self.fitting = self.timed = 0
        self.smallest: Layout | None = None
        self.least = np.inf

    def add(self, layouts: LayoutBatch, variant: Variant, fit: Fit) -> None:
        """Count `layouts` under `variant`, and take over the one with the least memory if it needs less than before."""
        self.count += fit.count
        self.fitting += fit.fitting
        index = int(np.argmin(fit.least))
        if fit.least[index] < self.least:
            self.least = float(fit.least[index])
            words = {name: CHOICES[name][getattr(variant, name)] for name in ("recompute", "offload")}
            layers = None if variant.layers in (None, -1) else variant.layers
            self.smallest = replace(layouts.row(index), recompute_layers=layers, **words)

    def merge(self, other: _Tally) -> None:
        """Add the numbers of `other`, and take over its smallest layout if that needs less memory."""
        self.count, self.fitting = self.count + other.count, self.fitting + other.fitting
        self.timed += other.timed
        if other.least < self.least:
            self.least, self.smallest = other.least, other.smallest


class _Best:
    """The fastest layout of every arrangement (see `_ranked_key`) so far, and the Pareto front of time and memory."""

    def __init__(self, *, with_front: bool = True) -> None:
        self._with_front = with_front
        self.fastest_of: dict[_Key, tuple[float, Layout]] = {}
        self.on_front: list[tuple[float, float, Layout]] = []
        # For each of `fastest_of`, the layout that is accepted in its place, or None.
        self._accepted: dict[_Key, tuple[Layout, Layout | None]] = {}

    def add(self, layouts: LayoutBatch, seconds: Floats, peak: Floats, rivals: _Rivals | None = None) -> None:
        """Add `layouts` with their seconds and their peak bytes, but for those that lose against `rivals`.

        The first of equally fast layouts stays.
        """
        by_time = np.argsort(seconds, kind="stable")
        order = by_time if rivals is None else by_time[seconds[by_time] <= rivals.limit]
        uses_axis = [
            (getattr(layouts, name)[order] > 1).astype(np.int64) for name in ("cp", "dp_replicate", "dp_shard")
        ]
        firsts, _ = unique_rows(*(getattr(layouts, name)[order] for name in _RANKED_FIELDS), *uses_axis)
        for index in order[np.sort(firsts)]:
            self._add_layout(float(seconds[index]), layouts.row(int(index)))
        order = by_time if rivals is None else by_time[rivals.may_be_on_front(seconds, peak)[by_time]]
        falling = np.minimum.accumulate(peak[order])
        on_front = order[np.flatnonzero(np.diff(falling, prepend=np.inf) < 0)]
        self._extend_front([(float(seconds[i]), float(peak[i]), layouts.row(int(i))) for i in on_front])

    def merge(self, other: _Best) -> None:
        """Add the layouts of `other`."""
        for seconds, layout in other.fastest_of.values():
            self._add_layout(seconds, layout)
        self._extend_front(other.on_front)

    def _add_layout(self, seconds: float, layout: Layout) -> None:
        """Store `layout` if it is the first of its arrangement, or faster than the one before."""
        key = _ranked_key(layout)
        if key not in self.fastest_of or seconds < self.fastest_of[key][0]:
            self.fastest_of[key] = seconds, layout

    def _extend_front(self, rows: list[tuple[float, float, Layout]]) -> None:
        """Add (seconds, bytes, layout) to the Pareto front, and remove the rows that are no longer on it."""
        rows, self.on_front, least = sorted(self.on_front + rows, key=lambda row: row[:2]), [], np.inf
        for row in rows:
            if row[1] < least:
                self.on_front, least = [*self.on_front, row], row[1]

    def rivals(self, count: int, accept: AcceptFn | None) -> _Rivals:
        """Return the layouts that others have to beat to change `fastest(count, accept)` or the Pareto front.

        Layouts that are too slow for `fastest` are dropped.
        """
        least_of: dict[object, float] = {}
        for key, (uncautious, layout) in self.fastest_of.items():
            shown, cautious = key[0][: len(_SHOWN_FIELDS)], cautious_seconds(layout, uncautious)
            if cautious < least_of.get(shown, np.inf) and self._accepted_layout(key, accept) is not None:
                least_of[shown] = cautious
        limit = np.inf
        if least_of:
            # Ties within a combination go to the simplest layout, and so do ties between combinations.
            least = min(least_of.values())
            tied = (1 + TIE_TOLERANCE) ** 2 * least
            slowest = sorted(least_of.values())[count - 1] if len(least_of) >= count else np.inf
            limit = (1 + TIE_TOLERANCE) * min(_KEPT_FACTOR * least, max(tied, slowest))
            self.fastest_of = {key: row for key, row in self.fastest_of.items() if row[0] <= limit}
        seconds, peak, _ = zip(*self.on_front, strict=True) if self.on_front else ((), (), ())
        return _Rivals(limit, np.array(seconds), np.array(peak), self._with_front)

    def _groups(self, accept: AcceptFn | None) -> list[list[tuple[float, Layout]]]:
        """Return the layouts accepted by `accept`, fastest first, with their `cautious_seconds`.

        There is a list for each combination of `_SHOWN_FIELDS`, with those that tie with its fastest.
        """
        groups: dict[object, list[tuple[float, Layout]]] = {}
        rows = [(cautious_seconds(layout, seconds), key) for key, (seconds, layout) in self.fastest_of.items()]
        for seconds, key in sorted(rows, key=lambda row: row[0]):
            layout = self._accepted_layout(key, accept)
            if layout is None:
                continue
            group = groups.setdefault(_shown_key(layout), [])
            if not group or seconds <= (1 + TIE_TOLERANCE) * group[0][0]:
                group.append((seconds, layout))
        return list(groups.values())

    def _accepted_layout(self, key: _Key, accept: AcceptFn | None) -> Layout | None:
        """Return the fastest layout with `key`, or the one that `accept` accepts in its place, or None.

        A trainer that cannot recompute in some layers only may recompute in all: that fits, too.
        """
        layout = self.fastest_of[key][1]
        if accept is None:
            return layout
        if key not in self._accepted or self._accepted[key][0] is not layout:
            choices = (layout, replace(layout, recompute_layers=None))
            self._accepted[key] = layout, next(filter(accept, choices), None)
        return self._accepted[key][1]

    def fastest(self, count: int, accept: AcceptFn | None) -> list[Layout]:
        """Return the `count` fastest layouts accepted by `accept`, one for each combination of `_SHOWN_FIELDS`.

        Ties within a combination go to the simplest layout. Of the combinations after the first `count`, add the
        `_REFINED` simplest that tie with the fastest. Layouts slower than the fastest by more than `_KEPT_FACTOR` are
        left out.
        """
        groups = self._groups(accept)
        near = [group for group in groups if group[0][0] <= _KEPT_FACTOR * groups[0][0][0]]
        simplest = [min(group, key=lambda row: (complexity(row[1]), row[0])) for group in near]
        ties = [row for row in simplest[count:] if row[0] <= (1 + TIE_TOLERANCE) * simplest[0][0]]
        ties.sort(key=lambda row: (complexity(row[1]), row[0]))
        return [layout for _, layout in (*simplest[:count], *ties[:_REFINED])]

    def front(self, most: int = 6) -> list[Layout]:
        """Return at most `most` layouts of the Pareto front, evenly spread."""
        picks = np.unique(np.linspace(0, len(self.on_front) - 1, min(most, len(self.on_front))).round().astype(int))
        return [self.on_front[index][2] for index in picks]


class _Rivals(NamedTuple):
    """The best layouts of a search so far.

    `limit`: seconds above which a layout cannot be among the fastest.
    `seconds`, `peak`: the Pareto front, fastest first; it counts only if `with_front`.
    """

    limit: float
    seconds: Floats
    peak: Floats
    with_front: bool

    def may_win(self, least: Floats, peak: Floats) -> Bools:
        """Return whether layouts that take at least `least` seconds, with `peak` bytes, may change the result."""
        wins: Bools = (least <= self.limit) | self.may_be_on_front(least, peak)
        return wins

    def may_be_on_front(self, least: Floats, peak: Floats) -> Bools:
        """Return whether layouts that take at least `least` seconds, with `peak` bytes, may join the Pareto front."""
        if not self.with_front:
            return np.zeros(len(least), np.bool_)
        if not len(self.seconds):
            return np.ones(len(least), np.bool_)
        faster = np.searchsorted(self.seconds, least, side="left") - 1
        joins: Bools = (faster < 0) | (peak < self.peak[faster])
        return joins


def _ranked_key(layout: Layout) -> _Key:
    """Return the arrangement of a layout: layouts with equal keys differ in numbers only."""
    return (_ranked_values(layout), layout.cp > 1, layout.dp_replicate > 1, layout.dp_shard > 1)


def _refine(
    job: Job, layouts: Sequence[Layout], pinned: Pins, accept: AcceptFn | None, top: int, caches: SearchCaches
) -> tuple[Estimate, ...]:
    """Return full estimates, with simulated pipelines, of at most `top` of the `layouts` that fit.

    Each of the `_REFINED` fastest is replaced by its fastest neighbour, if that is faster. `rank_plans` orders them; it
    may recommend a version that recomputes all layers instead.
    """

    def estimate_allowed(layouts: Iterable[Layout]) -> list[Estimate]:
        allowed = [item for item in layouts if (accept is None or accept(item)) and not _problems(job, item)]
        return [item for item in (estimate_for_search(job, layout, caches) for layout in allowed) if item.fits]

    fitting = [item for item in (_estimate_fitting(job, layout, pinned, caches) for layout in layouts) if item.fits]
    fitting.sort(key=lambda item: item.step_seconds)
    for place, plan in enumerate(fitting[:_REFINED]):
        neighbours = estimate_allowed(_neighbours(job, plan, pinned))
        fitting[place] = min([plan, *neighbours], key=lambda item: item.step_seconds)
    ranked = rank_plans(job, fitting, top, estimate_allowed(_with_all_recomputed(fitting, pinned)))
    return tuple(with_collectives(job, plan) for plan in ranked)


def _with_all_recomputed(plans: Sequence[Estimate], pinned: Pins) -> list[Layout]:
    """Return the layouts of those of `plans` that recompute some layers only, with all layers recomputed.

    The search recomputes so few layers that the memory is full. Where recomputing the others costs little time, a plan
    that leaves memory free has the lower expected time.
    """
    if pinned_recompute_layers(pinned) is not None:
        return []
    layouts = [plan.layout for plan in plans if plan.layout.recompute_layers is not None]
    return [replace(layout, recompute_layers=None) for layout in layouts]


def _estimate_fitting(job: Job, layout: Layout, pinned: Pins, caches: SearchCaches) -> Estimate:
    """Return the estimate of `layout`, with as few more recomputed layers as it needs to fit.

    The search takes memory to be linear in the recomputed layers, which may be slightly too low.
    """
    result = estimate_for_search(job, layout, caches)
    if result.fits or layout.recompute_layers is None or pinned_recompute_layers(pinned) is not None:
        return result
    low, high = layout.recompute_layers + 1, _most_layers(job, layout)
    result = estimate_for_search(job, replace(layout, recompute_layers=None), caches)
    while result.fits and low < high:
        middle = (low + high) // 2
        fewer = estimate_for_search(job, replace(layout, recompute_layers=middle), caches)
        low, high, result = (low, middle, fewer) if fewer.fits else (middle + 1, high, result)
    return result


def _most_layers(job: Job, layout: Layout) -> int:
    """Return an upper bound of the layers of a pp rank: those of the largest stage, times the stages per rank."""
    return max(last - first for first, last in stage_bounds(layout, job.model.num_hidden_layers)) * layout.stages


def _problems(job: Job, layout: Layout) -> list[str]:
    return illegal(job.model, layout, job.cluster, job.batch)


def _neighbours(job: Job, plan: Estimate, pinned: Pins) -> Iterator[Layout]:
    """Yield layouts next to `plan` that the search left out.

    They have stages balanced by cost, tensor parallelism without sequence parallelism, or up to three fewer
    recomputed layers (the number of layers came from an upper bound of the memory).
    """
    layout = plan.layout
    balanced = _with_balanced_stages(job, plan) if "stage_layers" not in pinned else None
    if balanced:
        yield balanced
    if layout.tp > 1 and "sequence_parallel" not in pinned:
        yield replace(layout, sequence_parallel=False)
    if layout.recompute != "none" and pinned_recompute_layers(pinned) is None:
        layers = layout.recompute_layers or _most_layers(job, layout)
        for fewer in range(1, 4):
            if layers > fewer:
                yield replace(layout, recompute_layers=layers - fewer)


def _with_balanced_stages(job: Job, plan: Estimate) -> Layout | None:
    """Return the layout of `plan` with stages balanced by time.

    None if they are balanced already, if there is one stage, or if there are more stages than layers.
    """
    layout, layers = plan.layout, job.model.num_hidden_layers
    count = layout.pp * layout.stages
    if count == 1 or count > layers:
        return None
    seconds = [stage.forward + stage.backward_input + stage.backward_weight for stage in plan.stages]
    sizes = [max(1, stage.last - stage.first) for stage in plan.stages]
    per_layer = min(second / size for second, size in zip(seconds, sizes, strict=True))
    first_extra, last_extra = (
        max(0.0, seconds[end] - per_layer * (plan.stages[end].last - plan.stages[end].first)) for end in (0, -1)
    )
    balanced = list(balance_stages([per_layer] * layers, count, first_extra, last_extra))
    if balanced == [end - begin for begin, end in stage_bounds(layout, job.model.num_hidden_layers)]:
        return None
    return replace(layout, stage_layers=tuple(balanced))
