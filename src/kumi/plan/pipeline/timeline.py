"""How long a pipeline takes, and what it keeps: lists of actions carried out in time, and closed forms for a search."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, Ints
from kumi.plan.pipeline.closed_forms import closed_form as closed_form
from kumi.spec.schedule import pattern, placement
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Action, Pattern

# Seconds of a stage for one microbatch: forward, input gradient, weight gradient. A full backward takes the last two.
Durations = Sequence[tuple[float, float, float]]


class Span(NamedTuple):
    """One action of a rank and its seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What every rank does when; `seconds` is when the last one is done."""

    seconds: float
    spans: tuple[tuple[Span, ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(span.end - span.start for span in rank) for rank in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank waits, before its first and after its last action included."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def longest(self) -> float:
        """The longest that a rank takes from its first action to its last: what a step costs where ranks go on to the
        next one without waiting for all others, as zero-bubble schedules do with post-validation of the update (Qi et
        al., 2024, arXiv:2401.10241, section 4)."""
        return max(rank[-1].end - rank[0].start for rank in self.spans)


def simulate(
    lists: Sequence[Sequence[Action]],
    held: Sequence[Sequence[int]],
    durations: Durations,
    transfer: float | Sequence[float] = 0.0,
    *,
    blocking: bool = False,
) -> Timeline:
    """The timeline of `lists` (see `kumi.spec.schedule.actions`) on ranks that hold the stages `held`.

    `transfer`: seconds to send a microbatch from each stage to the next, or its gradient back, one value or one a
    boundary; nothing within a rank. What a rank sends to another goes one after the other, beside computation, or,
    `blocking`, while the sender does nothing else. Raises ValueError where the lists wait for each other.
    """
    for rank in lists:
        _check_order(rank)
    microbatches = 1 + max(action.microbatch for rank in lists for action in rank)
    steps = _steps(held, durations, transfer, microbatches)
    race = _Race(len(lists), blocking)
    seconds = race.finish([[steps[action.kind][action.stage] for action in rank] for rank in lists])
    spans = tuple(
        tuple(
            Span(action, end - steps[action.kind][action.stage].seconds, end) for action, end in zip(*rank, strict=True)
        )
        for rank in zip(lists, race.ends, strict=True)
    )
    return Timeline(seconds, spans)


def makespan(
    schedule: str,
    pp: int,
    stages: int,
    microbatches: int,
    durations: Durations,
    transfer: float | Sequence[float] = 0.0,
    *,
    blocking: bool = False,
) -> float:
    """`simulate(...).seconds`, equal but for rounding, without going through all microbatches where they are many.

    Once some blocks in a row (see `kumi.spec.schedules.schedule_record.Pattern`) have come on every rank by one and
    the same time later than those before them, all further ones will: an action's end is the latest of a few earlier
    ends, plus constants, and nothing in a block needs more than the last few (`Schedule.reach`). What follows the
    blocks is then later by that time, too. The time may be that of several blocks: with transfers, what goes round
    between p ranks comes back after p.
    """
    patterns = [pattern(schedule, pp, stages, microbatches, rank) for rank in range(pp)]
    held = placement(schedule, pp, stages)
    if SCHEDULES[schedule].forwards_first:
        return _two_ways(microbatches, durations, _sends(held, transfer)[0][1:-1], blocking)
    steps = _steps(held, durations, transfer, microbatches)
    parts = [_parts(one, own, steps) for one, own in zip(patterns, held, strict=True)]
    blocks, reach = min(one.repeats for one in patterns), SCHEDULES[schedule].reach
    race = _Race(pp, blocking)
    upto, span, later = reach + 1, 0, 0.0
    while upto < blocks and not span:
        race.run([warm + block * upto for warm, block, _ in parts])
        span, later = _steady(parts, race.ends, reach, 2 * pp)
        upto += 0 if span else max(1, upto // 2)
    skip = (blocks - upto) // span if span else 0
    lists = [
        warm + block * (one.repeats - skip * span) + rest
        for one, (warm, block, rest) in zip(patterns, parts, strict=True)
    ]
    return race.finish(lists) + skip * later


def _two_ways(microbatches: int, durations: Durations, sends: Sequence[float], blocking: bool) -> float:
    """Seconds of all forwards, then all backwards: each way, all stages and links once, and the slowest of them once
    more for each further microbatch."""
    found = 0.0
    ways = [([one[0] for one in durations], [*sends, 0.0]), ([one[1] + one[2] for one in durations], [0.0, *sends])]
    for stages, after in ways:
        slowest = max(work + send if blocking else max(work, send) for work, send in zip(stages, after, strict=True))
        found += sum(stages) + sum(after) + (microbatches - 1) * slowest
    return found


def _parts(one: Pattern, held: Sequence[int], steps: dict[str, list[_Step]]) -> tuple[list[_Step], ...]:
    """The steps of the three parts of `one`."""
    return tuple([steps[kind][held[chunk]] for kind, chunk in part] for part in (one.warm, one.block, one.rest))


def _steady(
    parts: Sequence[tuple[list[_Step], ...]], ends: Sequence[Sequence[float]], reach: int, most: int
) -> tuple[int, float]:
    """After how many blocks, `most` at most, the last `reach` that all ranks are through with are as before, but later,
    and by how much later; (0, 0.0) where they are not."""
    sizes = [(len(warm), len(block)) for warm, block, _ in parts]
    done = min((len(rank) - warm) // block for rank, (warm, block) in zip(ends, sizes, strict=True))
    seen = max(0, done - reach - most)
    cut = [
        np.array(rank[warm + seen * block : warm + done * block]).reshape(done - seen, block)
        for rank, (warm, block) in zip(ends, sizes, strict=True)
    ]
    found = np.concatenate(cut, axis=1)
    for span in range(1, done - seen - reach + 1):
        later = found[-reach:] - found[-reach - span : -span]
        low, high = float(later.min()), float(later.max())
        if high - low <= 1e-12 * float(found[-1].max()):
            return span, (high + low) / 2
    return 0, 0.0


# When microbatches reach a stage, in order; those that an action has taken are gone.
Arrivals = deque[float]


class _Step(NamedTuple):
    """What a kind of action on a stage waits for, its seconds, and whom its result is for, if anyone: seconds to send
    it, 0 where it stays on the rank, and when the link is free for it (a list of one)."""

    waits: Arrivals
    seconds: float
    receiver: Arrivals | None
    send: float
    link: list[float]


def _steps(
    held: Sequence[Sequence[int]], durations: Durations, transfer: float | Sequence[float], microbatches: int
) -> dict[str, list[_Step]]:
    """The step of every kind of action on every stage."""
    last = len(durations) - 1
    sends, links = _sends(held, transfer)
    forward = [deque([0.0] * microbatches if stage == 0 else []) for stage in range(last + 1)]
    backward: list[Arrivals] = [deque() for _ in durations]
    found: dict[str, list[_Step]] = {kind: [] for kind in "FBIW"}
    for stage, (ahead, inputs, weights) in enumerate(durations):
        receiver = backward[stage] if stage == last else forward[stage + 1]
        found["F"].append(_Step(forward[stage], ahead, receiver, sends[stage + 1], links[stage, stage + 1]))
        back = (backward[stage - 1] if stage else None, sends[stage], links[stage, stage - 1])
        found["B"].append(_Step(backward[stage], inputs + weights, *back))
        found["I"].append(_Step(backward[stage], inputs, *back))
        found["W"].append(_Step(deque([0.0] * microbatches), weights, None, 0.0, []))
    return found


def _sends(
    held: Sequence[Sequence[int]], transfer: float | Sequence[float]
) -> tuple[list[float], dict[tuple[int, int], list[float]]]:
    """Seconds over the boundary before every stage and after the last, and the link from a stage to its neighbour: one
    for each pair of ranks and direction."""
    rank = {stage: number for number, stages in enumerate(held) for stage in stages}
    count = len(rank)
    each = (
        [float(transfer)] * (count - 1) if isinstance(transfer, int | float) else [float(value) for value in transfer]
    )
    if len(each) != count - 1:
        raise ValueError(f"{len(each)} transfers for the {count - 1} boundaries of {count} stages")
    rank[-1], rank[count] = rank[0], rank[count - 1]
    sends = [0.0, *(0.0 if rank[low] == rank[low + 1] else each[low] for low in range(count - 1)), 0.0]
    links: dict[tuple[int, int], list[float]] = {}
    neighbours = [(stage, other) for stage in range(count) for other in (stage - 1, stage + 1)]
    return sends, {(one, other): links.setdefault((rank[one], rank[other]), [0.0]) for one, other in neighbours}


class _Race:
    """How far every rank is through its list: when each step so far ended, and when the rank is free again."""

    def __init__(self, ranks: int, blocking: bool) -> None:
        self.ends: list[list[float]] = [[] for _ in range(ranks)]
        self._free = [0.0] * ranks
        self._blocking = blocking

    def run(self, lists: Sequence[Sequence[_Step]]) -> None:
        """Goes on through `lists`, which begin with what was done before, until all that is left waits for more."""
        left, before = list(range(len(lists))), -1
        while (done := sum(map(len, self.ends))) != before:
            before = done
            left = [rank for rank in left if len(self.ends[rank]) < len(lists[rank])]
            for rank in left:
                self._free[rank] = _go_on(lists[rank], self.ends[rank], self._free[rank], self._blocking)

    def finish(self, lists: Sequence[Sequence[_Step]]) -> float:
        """Goes on to the end of `lists`; returns when the last step ends. Raises ValueError where ranks wait for each
        other."""
        self.run(lists)
        stuck = [rank for rank, (listed, done) in enumerate(zip(lists, self.ends)) if len(done) < len(listed)]
        if stuck:
            raise ValueError(f"ranks {stuck} wait for each other; a forward must come before its backward everywhere")
        return max(rank[-1] for rank in self.ends)


def _go_on(listed: Sequence[_Step], ends: list[float], free: float, blocking: bool) -> float:
    """Carries out `listed` from where `ends` stops, from second `free` on, until something has not arrived yet; returns
    when the rank is free again."""
    for position in range(len(ends), len(listed)):
        waits, seconds, receiver, send, link = listed[position]
        if not waits:
            break
        arrived = waits.popleft()
        free = (arrived if arrived > free else free) + seconds
        ends.append(free)
        if receiver is None:
            continue
        if send:
            link[0] = (link[0] if link[0] > free else free) + send
            receiver.append(link[0])
            free = link[0] if blocking else free
        else:
            receiver.append(free)
    return free


def _check_order(listed: Sequence[Action]) -> None:
    """Raises ValueError where microbatches of a kind are not in order on a stage, which `_run` relies on."""
    latest: dict[tuple[str, int], int] = {}
    for action in listed:
        key = ("B" if action.kind == "I" else action.kind, action.stage)
        before = latest.get(key, -1)
        if action.microbatch != before + 1 and (action.kind != "W" or action.microbatch <= before):
            raise ValueError(f"{action} follows microbatch {before} of its kind; put microbatches in ascending order")
        latest[key] = action.microbatch


def in_flight(schedule: Ints, pp: Ints, stages: Ints, microbatches: Ints, rank: Ints) -> Floats:
    """How many microbatches' worth of pp rank `rank`'s layers keep activations at the peak, for every row.

    `schedule` holds numbers of `kumi.spec.schedules.SCHEDULES`. Where a rank has several stages, each is taken to hold
    the same part of its layers.
    """
    microbatches_kept: Floats = np.zeros(len(pp))
    for number, record in enumerate(SCHEDULES.values()):
        rows = schedule == number
        if rows.any():
            microbatches_kept = np.where(rows, record.in_flight(np, pp, stages, microbatches, rank), microbatches_kept)
    return microbatches_kept / stages
