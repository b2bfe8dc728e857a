"""Simulation of pipeline schedules: when every action of every rank starts and ends, and the length of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, Ints
from kumi.spec.schedule import rank_program, stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Action, RankProgram

# Seconds of each stage for one microbatch: forward, input gradient, weight gradient. A full backward takes the sum of
# the last two.
Durations = Sequence[tuple[float, float, float]]


class TimedAction(NamedTuple):
    """An action of a rank with its start and end, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """The timed actions of every rank, in `spans`. `seconds` is the end of the last one."""

    seconds: float
    spans: tuple[tuple[TimedAction, ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(sum(span.end - span.start for span in rank) for rank in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank waits, including before its first and after its last action."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def longest_rank_seconds(self) -> float:
        """The longest time between a rank's first and last action.

        It is the length of a step if ranks start the next step without waiting for each other, as zero-bubble
        schedules do with post-validation of the update (Qi et al., 2024, arXiv:2401.10241, section 4).
        """
        return max(rank[-1].end - rank[0].start for rank in self.spans)


def simulate(
    lists: Sequence[Sequence[Action]],
    stages_of_rank: Sequence[Sequence[int]],
    durations: Durations,
    transfer: float | Sequence[float] = 0.0,
    *,
    blocking: bool = False,
) -> Timeline:
    """Return the timeline of the action lists of all ranks (see `kumi.spec.schedule.actions`).

    `transfer`: seconds to send a microbatch from a stage to the next, or its gradient back; one value, or one for each
    boundary. Neighbouring stages on one rank send nothing. Messages from one rank to another are sent one at a time,
    during computation, or, if `blocking`, while the sender computes nothing.

    Raise ValueError if the lists deadlock.
    """
    for rank in lists:
        _check_order(rank)
    microbatches = 1 + max(action.microbatch for rank in lists for action in rank)
    steps = _steps(stages_of_rank, durations, transfer, microbatches)
    simulation = _Simulation(len(lists), blocking)
    seconds = simulation.finish([[steps[action.kind][action.stage] for action in rank] for rank in lists])
    spans = tuple(
        tuple(
            TimedAction(action, end - steps[action.kind][action.stage].seconds, end)
            for action, end in zip(*rank, strict=True)
        )
        for rank in zip(lists, simulation.ends, strict=True)
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
    """Return `simulate(...).seconds` up to rounding, without simulating every microbatch of a long step.

    A schedule repeats a block of actions (`kumi.spec.schedules.schedule_record.RankProgram`). An action's end is the
    latest of a few earlier ends plus constants, and a block depends only on the last few blocks (`Schedule.reach`). So
    once several consecutive blocks end later than the blocks before them by the same time on every rank, all further
    blocks do, and the actions after the blocks are delayed by that time for each skipped block. The period may be
    several blocks: with transfers, a dependency that circles through p ranks returns after p blocks.
    """
    patterns = [rank_program(schedule, pp, stages, microbatches, rank) for rank in range(pp)]
    stages_of_rank = stage_assignment(schedule, pp, stages)
    if SCHEDULES[schedule].forwards_first:
        return _all_forwards_first(microbatches, durations, _sends(stages_of_rank, transfer)[0][1:-1], blocking)
    steps = _steps(stages_of_rank, durations, transfer, microbatches)
    parts = [_parts(program, own, steps) for program, own in zip(patterns, stages_of_rank, strict=True)]
    blocks, reach = min(program.repeats for program in patterns), SCHEDULES[schedule].reach
    simulation = _Simulation(pp, blocking)
    simulated, period, delay = reach + 1, 0, 0.0
    while simulated < blocks and not period:
        simulation.run([warmup + block * simulated for warmup, block, _ in parts])
        period, delay = _steady_period(parts, simulation.ends, reach, 2 * pp)
        simulated += 0 if period else max(1, simulated // 2)
    skipped = (blocks - simulated) // period if period else 0
    lists = [
        warmup + block * (program.repeats - skipped * period) + cooldown
        for program, (warmup, block, cooldown) in zip(patterns, parts, strict=True)
    ]
    return simulation.finish(lists) + skipped * delay


def _all_forwards_first(microbatches: int, durations: Durations, sends: Sequence[float], blocking: bool) -> float:
    """Return the seconds of all forwards followed by all backwards.

    Each direction takes all stages and links once, and the slowest stage or link once more per further microbatch.
    """
    seconds = 0.0
    directions = [
        ([forward for forward, _, _ in durations], [*sends, 0.0]),
        ([inputs + weights for _, inputs, weights in durations], [0.0, *sends]),
    ]
    for stages, after in directions:
        slowest = max(work + send if blocking else max(work, send) for work, send in zip(stages, after, strict=True))
        seconds += sum(stages) + sum(after) + (microbatches - 1) * slowest
    return seconds


def _parts(program: RankProgram, stages: Sequence[int], steps: dict[str, list[_Step]]) -> tuple[list[_Step], ...]:
    """Return the steps of the warmup, the block and the cooldown of `program`, for a rank that holds `stages`."""
    return tuple(
        [steps[kind][stages[chunk]] for kind, chunk in part]
        for part in (program.warmup, program.steady, program.cooldown)
    )


def _steady_period(
    parts: Sequence[tuple[list[_Step], ...]], ends: Sequence[Sequence[float]], reach: int, longest: int
) -> tuple[int, float]:
    """Return the period of the steady state, in blocks, and the seconds of a period; (0, 0.0) if it is not reached yet.

    It is reached when the last `reach` blocks that all ranks have finished end later than the blocks one period earlier
    by the same time on every rank. `longest`: the largest period to try.
    """
    sizes = [(len(warmup), len(block)) for warmup, block, _ in parts]
    done = min((len(rank) - warmup) // block for rank, (warmup, block) in zip(ends, sizes, strict=True))
    first = max(0, done - reach - longest)
    windows = [
        np.array(rank[warmup + first * block : warmup + done * block]).reshape(done - first, block)
        for rank, (warmup, block) in zip(ends, sizes, strict=True)
    ]
    block_ends = np.concatenate(windows, axis=1)
    for period in range(1, done - first - reach + 1):
        delays = block_ends[-reach:] - block_ends[-reach - period : -period]
        low, high = float(delays.min()), float(delays.max())
        if high - low <= 1e-12 * float(block_ends[-1].max()):
            return period, (high + low) / 2
    return 0, 0.0


# Seconds at which microbatches arrive at a stage, in order. An action removes the microbatch that it takes.
_Arrivals = deque[float]


class _Step(NamedTuple):
    """An action of one kind on one stage.

    `waits`: arrivals of its input.
    `seconds`: its duration.
    `receiver`: arrivals at the stage that takes the result, or None.
    `send`: seconds to send the result; 0 if it stays on the rank.
    `link`: when the link is free, as a list of one float.
    """

    waits: _Arrivals
    seconds: float
    receiver: _Arrivals | None
    send: float
    link: list[float]


def _steps(
    stages_of_rank: Sequence[Sequence[int]], durations: Durations, transfer: float | Sequence[float], microbatches: int
) -> dict[str, list[_Step]]:
    """Return the step of every kind of action on every stage.

    The kinds are F (forward), B (full backward), I (input gradient) and W (weight gradient).
    """
    last = len(durations) - 1
    sends, links = _sends(stages_of_rank, transfer)
    forward = [deque([0.0] * microbatches if stage == 0 else []) for stage in range(last + 1)]
    backward: list[_Arrivals] = [deque() for _ in durations]
    steps: dict[str, list[_Step]] = {kind: [] for kind in "FBIW"}
    for stage, (ahead, inputs, weights) in enumerate(durations):
        receiver = backward[stage] if stage == last else forward[stage + 1]
        steps["F"].append(_Step(forward[stage], ahead, receiver, sends[stage + 1], links[stage, stage + 1]))
        back = (backward[stage - 1] if stage else None, sends[stage], links[stage, stage - 1])
        steps["B"].append(_Step(backward[stage], inputs + weights, *back))
        steps["I"].append(_Step(backward[stage], inputs, *back))
        steps["W"].append(_Step(deque([0.0] * microbatches), weights, None, 0.0, []))
    return steps


def _sends(
    stages_of_rank: Sequence[Sequence[int]], transfer: float | Sequence[float]
) -> tuple[list[float], dict[tuple[int, int], list[float]]]:
    """Return the seconds to send over each boundary, and the link from each stage to its neighbours.

    The boundaries are those before every stage and the one after the last. Stages on the same pair of ranks share one
    link in each direction.
    """
    rank_of = {stage: rank for rank, stages in enumerate(stages_of_rank) for stage in stages}
    count = len(rank_of)
    seconds = (
        [float(transfer)] * (count - 1) if isinstance(transfer, int | float) else [float(value) for value in transfer]
    )
    if len(seconds) != count - 1:
        raise ValueError(f"{len(seconds)} transfers for the {count - 1} boundaries of {count} stages; give one each")
    rank_of[-1], rank_of[count] = rank_of[0], rank_of[count - 1]
    sends = [0.0, *(0.0 if rank_of[low] == rank_of[low + 1] else seconds[low] for low in range(count - 1)), 0.0]
    links: dict[tuple[int, int], list[float]] = {}
    neighbours = [(stage, other) for stage in range(count) for other in (stage - 1, stage + 1)]
    return sends, {
        (stage, other): links.setdefault((rank_of[stage], rank_of[other]), [0.0]) for stage, other in neighbours
    }


class _Simulation:
    """The progress of every rank through its list: the ends of its steps so far, and when it is free for the next."""

    def __init__(self, ranks: int, blocking: bool) -> None:
        self.ends: list[list[float]] = [[] for _ in range(ranks)]
        self._free = [0.0] * ranks
        self._blocking = blocking

    def run(self, lists: Sequence[Sequence[_Step]]) -> None:
        """Continue through `lists`, which begin with the steps run so far, until every rank is done or blocked."""
        unfinished, before = list(range(len(lists))), -1
        while (done := sum(map(len, self.ends))) != before:
            before = done
            unfinished = [rank for rank in unfinished if len(self.ends[rank]) < len(lists[rank])]
            for rank in unfinished:
                self._free[rank] = _continue(lists[rank], self.ends[rank], self._free[rank], self._blocking)

    def finish(self, lists: Sequence[Sequence[_Step]]) -> float:
        """Continue to the end of `lists`, and return the end of the last step.

        Raise ValueError if ranks wait for each other.
        """
        self.run(lists)
        stuck = [rank for rank, (steps, done) in enumerate(zip(lists, self.ends)) if len(done) < len(steps)]
        if stuck:
            raise ValueError(f"ranks {stuck} wait for each other; a forward must come before its backward on all ranks")
        return max(rank[-1] for rank in self.ends)


def _continue(steps: Sequence[_Step], ends: list[float], free: float, blocking: bool) -> float:
    """Run `steps` from position len(`ends`) until an input has not arrived; return when the rank is free.

    `free`: the second at which the rank can start.
    """
    for position in range(len(ends), len(steps)):
        waits, seconds, receiver, send, link = steps[position]
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


def _check_order(actions: Sequence[Action]) -> None:
    """Raise ValueError unless the microbatches of a kind are in order on each stage, as `_continue` requires."""
    latest: dict[tuple[str, int], int] = {}
    for action in actions:
        key = ("B" if action.kind == "I" else action.kind, action.stage)
        before = latest.get(key, -1)
        if action.microbatch != before + 1 and (action.kind != "W" or action.microbatch <= before):
            raise ValueError(
                f"{action} follows microbatch {before} of its kind and stage; put microbatches in ascending order"
            )
        latest[key] = action.microbatch


def in_flight(schedule: Ints, pp: Ints, stages: Ints, microbatches: Ints, rank: Ints) -> Floats:
    """Return the peak number of microbatches with activations on pp rank `rank`, for every row.

    `schedule`: indices into `kumi.spec.schedules.SCHEDULES`. With several stages per rank, each counts as an equal
    share of the rank's layers, so the number may be a fraction.
    """
    peak: Floats = np.zeros(len(pp))
    for code, record in enumerate(SCHEDULES.values()):
        rows = np.flatnonzero(schedule == code)
        if len(rows):
            peak[rows] = record.in_flight(np, *(column[rows] for column in (pp, stages, microbatches, rank)))
    return peak / stages
