"""Simulate the messages between pipeline ranks under NCCL's rules: which ranks are stuck, and what waiting costs.

    python benchmarks/p2p_order.py [--cases 10000] [--seed 0] [--json FILE]

The simulated lists are those that the executor runs (`kumi.spec.sends_and_recvs`), on the communicators that it uses on
GPUs (`kumi.spec.pipeline_channels`). Process groups of GPUs are connected from the start, so these rules hold:

- A rank runs the operations of one communicator one after the other, in the order of their posts.
- A send or receive begins when the rank's computation has come to the place in the list where it is posted.
- A send and its receive run at the same time, so the rank that comes first waits for the other. NCCL's buffers, with
  which a short send may end early, are left out.
- The sends and receives between two ranks on one communicator are matched by their order, because NCCL has no tags.
- A group of sends and receives is one operation, which ends when all of them have.
- Messages on different communicators do not slow each other.

A random case is a schedule with its ranks, stages and microbatches, unequal stages, seconds that vary from action to
action, and unequal links, with messages of up to 0.6 of a stage's forward. Every tenth, on average, is an evaluation,
which has forwards only. Exposed time is the time that a step takes longer than with independent edges.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from kumi.process_limits import usable_cores
from kumi.spec.pipeline_channels import channel_name
from kumi.spec.schedule import illegal_schedule, stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Action
from kumi.spec.sends_and_recvs import (
    Message,
    Receive,
    Send,
    dependency,
    forward_pipeline_steps,
    messages_after,
    pipeline_steps,
)


class Grouped(NamedTuple):
    """Sends and receives that a rank posts as one operation, as `batch_isend_irecv` does."""

    transfers: tuple[Send | Receive, ...]


Step = Action | Send | Receive | Grouped
# Seconds of an action, or of the transfer of a message.
Seconds = Mapping[Action | Message, float]

# Sets of communicators: the communicator of a message between `pp` ranks.
# - "channels": those of the executor on GPUs.
# - "kinds": one for activations, one for gradients.
# - "single": one for all, as if a device ran a single operation of NCCL at a time.
# - "edges": independent edges: one for each kind of message from a rank to another.
COMMUNICATORS: dict[str, Callable[[Message, int], Hashable]] = {
    "channels": lambda message, pp: channel_name(message.kind, message.source, message.target, pp),
    "kinds": lambda message, pp: message.kind,
    "single": lambda message, pp: "",
    "edges": lambda message, pp: (message.kind, message.source, message.target),
}


@dataclass(frozen=True)
class Case:
    """A step of a pipeline with `pp` ranks.

    `lists`: the steps of each rank.
    `inputs`: action -> the message that it waits for; other actions wait for none.
    """

    name: str
    pp: int
    lists: Sequence[Sequence[Step]]
    inputs: Mapping[Action, Message]
    seconds: Seconds

    def step_seconds(self, communicators: str) -> float:
        """Return the length of the step with one of `COMMUNICATORS`. Raise as `Simulation.run` does."""
        communicator_of = COMMUNICATORS[communicators]
        names = {item: communicator_of(item, self.pp) for item in self.seconds if isinstance(item, Message)}
        return Simulation(self.lists, self.inputs, self.seconds, names).run()

    def with_receives_first(self) -> Case:
        """Return this case with all receives of the step posted at its start."""
        lists = [sorted(steps, key=lambda step: not isinstance(step, Receive)) for steps in self.lists]
        return replace(self, lists=lists)


@dataclass
class _Operation:
    """An operation in the queue of a rank on a communicator.

    `ready`: the second at which it can begin.
    `unmatched`: its sends and receives that have not met their counterparts.
    `received`: the messages that have arrived when it ends.
    `end`: the end of its transfers so far.
    """

    ready: float
    unmatched: list[Send | Receive]
    received: tuple[Message, ...]
    end: float = 0.0


@dataclass
class Simulation:
    """The progress of all ranks through `lists` (see `Case`).

    `communicators`: the communicator of each message.
    `position`, `clock`: steps that each rank has taken, and the second at which it takes the next.
    `queues`, `free`: (rank, communicator) -> operations that have not ended, and the end of the last that has.
    `arrived`: message -> second of its arrival.
    """

    lists: Sequence[Sequence[Step]]
    inputs: Mapping[Action, Message]
    seconds: Seconds
    communicators: Mapping[Message, Hashable]
    position: list[int] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    queues: dict[tuple[int, Hashable], deque[_Operation]] = field(default_factory=lambda: defaultdict(deque))
    free: dict[tuple[int, Hashable], float] = field(default_factory=lambda: defaultdict(float))
    arrived: dict[Message, float] = field(default_factory=dict)

    def run(self) -> float:
        """Return the end of the last action or message.

        Raise RuntimeError if ranks are stuck, and ValueError if a send meets the receive of another message.
        """
        self.position, self.clock = [0] * len(self.lists), [0.0] * len(self.lists)
        while sum(map(self._continue, range(len(self.lists)))):
            pass
        stuck = {rank for rank, steps in enumerate(self.lists) if self.position[rank] < len(steps)}
        stuck |= {rank for (rank, _), queue in self.queues.items() if queue}
        if stuck:
            raise RuntimeError(f"ranks {sorted(stuck)} wait for each other")
        return max(*self.clock, *self.free.values())

    def _continue(self, rank: int) -> bool:
        """Take the steps of `rank` up to an action whose message has not arrived; return whether there were any."""
        steps, first, now = self.lists[rank], self.position[rank], self.clock[rank]
        for step in steps[first:]:
            if isinstance(step, Action):
                message = self.inputs.get(step)
                if message is not None:
                    if message not in self.arrived:
                        break
                    now = max(now, self.arrived[message])
                now += self.seconds[step]
            else:
                self._post(rank, now, step)
            self.position[rank] += 1
        self.clock[rank] = now
        return self.position[rank] > first

    def _post(self, rank: int, now: float, step: Send | Receive | Grouped) -> None:
        transfers = step.transfers if isinstance(step, Grouped) else (step,)
        communicator = self.communicators[transfers[0].message]
        received = tuple(transfer.message for transfer in transfers if isinstance(transfer, Receive))
        key = rank, communicator
        self.queues[key].append(_Operation(max(now, self.free[key]), list(transfers), received))
        changed = [rank] if len(self.queues[key]) == 1 else []
        while changed:
            changed += self._match(changed.pop(), communicator)

    def _match(self, rank: int, communicator: Hashable) -> list[int]:
        """Run those transfers of the rank's first operation whose counterparts are in other ranks' first operations.

        Return the ranks whose first operation is then another.
        """
        if not self.queues[rank, communicator]:
            return []
        mine, involved = self.queues[rank, communicator][0], {rank}
        for transfer in tuple(mine.unmatched):
            source, target = transfer.message[3:]
            peer = target if rank == source else source
            queue = self.queues[peer, communicator]
            counterpart = (
                next((other for other in queue[0].unmatched if _meet(transfer, other)), None) if queue else None
            )
            if counterpart is None:
                continue
            if counterpart.message != transfer.message:
                raise ValueError(f"on rank {rank} the next is {transfer}, but on rank {peer} {counterpart}")
            end = max(mine.ready, queue[0].ready) + self.seconds[transfer.message]
            for operation, part in ((mine, transfer), (queue[0], counterpart)):
                operation.unmatched.remove(part)
                operation.end = max(operation.end, end)
            involved.add(peer)
        return [each for each in sorted(involved) if self._advance(each, communicator)]

    def _advance(self, rank: int, communicator: Hashable) -> bool:
        """Remove the rank's first operation if it has ended; return whether another follows it."""
        queue = self.queues[rank, communicator]
        if queue[0].unmatched:
            return False
        ended = queue.popleft()
        self.free[rank, communicator] = ended.end
        self.arrived |= dict.fromkeys(ended.received, ended.end)
        if queue:
            queue[0].ready = max(queue[0].ready, ended.end)
        return bool(queue)


def _meet(transfer: Send | Receive, other: Send | Receive) -> bool:
    """Return whether NCCL matches both: a send and a receive between the same ranks in the same direction."""
    return type(transfer) is not type(other) and transfer.message[3:] == other.message[3:]


def case(name: str, lists: Sequence[Sequence[Step]], assignment: Sequence[Sequence[int]], seconds: Seconds) -> Case:
    """Return a case of `lists`. `assignment`: the stages of each rank."""
    home = {stage: rank for rank, stages in enumerate(assignment) for stage in stages}
    inputs: dict[Action, Message] = {}
    for rank, steps in enumerate(lists):
        for action in (step for step in steps if isinstance(step, Action)):
            before = dependency(action, len(home))
            message = next(messages_after(before, home), None) if before is not None else None
            if message is not None and message.target == rank:
                inputs[action] = message
    return Case(name, len(lists), lists, inputs, seconds)


def random_case(number: int, seed: int = 0) -> Case:
    """Return random case `number` of a seed, always the same. The schedules take turns."""
    draw = random.Random(f"{seed} {number}")
    schedule = list(SCHEDULES)[number % len(SCHEDULES)]
    record, pp = SCHEDULES[schedule], draw.randint(2, 8)
    stages = record.stages + (draw.randint(0, 2) if record.more_stages else 0)
    microbatches = draw.choice([n for n in range(1, 4 * pp + 1) if not illegal_schedule(schedule, pp, stages, n)])
    training = draw.random() > 0.1
    lists = (pipeline_steps if training else forward_pipeline_steps)(schedule, pp, stages, microbatches)
    seconds = _random_seconds(draw, lists, pp * stages)
    return case(schedule if training else "evaluation", lists, stage_assignment(schedule, pp, stages), seconds)


def _random_seconds(draw: random.Random, lists: Sequence[Sequence[Step]], stages: int) -> dict[Action | Message, float]:
    """Return seconds of all actions and messages, in units of an average stage's forward."""
    unevenness, jitter, transfer = draw.uniform(0, 0.5), draw.uniform(0, 0.5), draw.uniform(0, 0.3)
    pace = [1 + draw.uniform(-1, 1) * unevenness for _ in range(stages)]
    kinds = {"F": 1.0, "I": draw.uniform(0.8, 1.5), "W": draw.uniform(0.5, 1.2)}
    kinds["B"] = kinds["I"] + kinds["W"]
    links: dict[tuple[int, int], float] = defaultdict(lambda: transfer * draw.choice((0.5, 1, 2)))
    seconds: dict[Action | Message, float] = {}
    for steps in lists:
        for step in steps:
            if isinstance(step, Action):
                seconds[step] = kinds[step.kind] * pace[step.stage] * draw.uniform(1 - jitter, 1 + jitter)
            elif isinstance(step, Send):
                seconds[step.message] = links[step.message[3:]]
    return seconds


@dataclass(frozen=True)
class Figures:
    """Shares of the time of a step.

    `kinds`, `channels`: exposed time with these communicators.
    `receives_first`: time that is saved if all receives are posted at the start of the step, on the channels.
    """

    kinds: float
    channels: float
    receives_first: float


COLUMNS = tuple(column.name for column in fields(Figures))


def figures(each: Case) -> Figures | None:
    """Return the figures of a case, or None if ranks are stuck with one of `COMMUNICATORS`."""
    try:
        steps = {name: each.step_seconds(name) for name in COMMUNICATORS}
    except RuntimeError:
        return None
    first = each.with_receives_first().step_seconds("channels")
    exposed = {name: steps[name] / steps["edges"] - 1 for name in ("kinds", "channels")}
    return Figures(**exposed, receives_first=1 - first / steps["channels"])


def _named_figures(number: int, seed: int) -> tuple[str, Figures | None]:
    each = random_case(number, seed)
    return each.name, figures(each)


def measure(cases: int, seed: int, workers: int) -> dict[str, dict[str, float]]:
    """Return the figures of random cases by schedule, with evaluations apart: means, and the largest as `..._most`.

    Cases in which ranks are stuck are only counted.
    """
    rows: dict[str, list[Figures | None]] = {name: [] for name in (*SCHEDULES, "evaluation")}
    with ProcessPoolExecutor(workers) as pool:
        for name, row in pool.map(_named_figures, range(cases), [seed] * cases, chunksize=50):
            rows[name].append(row)
    return {name: _summary(own) for name, own in rows.items() if own}


def _summary(rows: Sequence[Figures | None]) -> dict[str, float]:
    ended = [row for row in rows if row is not None]
    summary: dict[str, float] = {"cases": len(rows), "stuck": len(rows) - len(ended)}
    for name in COLUMNS:
        shares = [getattr(row, name) for row in ended] or [math.nan]
        summary |= {name: statistics.fmean(shares), f"{name}_most": max(shares)}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes that simulate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = parser.parse_args()
    rows = measure(args.cases, args.seed, args.workers)
    print(f"{'mean / most':12}{'cases':>7}{'stuck':>7}", *(f"{name:>17}" for name in COLUMNS))
    for name, row in rows.items():
        shares = (f"{row[column]:.2%} / {row[f'{column}_most']:.1%}" for column in COLUMNS)
        print(f"{name:12}{row['cases']:>7}{row['stuck']:>7}", *(f"{share:>17}" for share in shares))
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "schedules": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
