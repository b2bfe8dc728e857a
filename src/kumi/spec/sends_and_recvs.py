"""What the ranks of a pipeline send each other, in one order that all of them keep.

A schedule's lists say what every rank computes; between neighbouring stages on different ranks activations go forward
and gradients back. Each rank posts its sends and receives one after the other, as NCCL carries them out; two ranks that
posted the same two messages in different orders would wait for each other for ever. So the lists are carried out in
thought, and all messages are ordered by when their sender has finished what is in them: whatever a rank does then comes
after what it needs, and nobody can be stuck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from kumi.spec.schedule import actions, placement
from kumi.spec.schedules.schedule_record import Action

# Of a forward, an input gradient, a weight gradient and a full backward, in units of one of them.
UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
ACTIVATION, GRADIENT = "activation", "gradient"


class Message(NamedTuple):
    """Hidden states that `stage` returned, or the gradient of what it took in ("activation" or "gradient"), of one
    microbatch, from pipeline rank `source` to `target`."""

    kind: str
    stage: int
    microbatch: int
    source: int
    target: int


class Send(NamedTuple):
    """The rank posts a message, when the action before it has made what is in it."""

    message: Message


class Receive(NamedTuple):
    """The rank makes room for a message; the action that needs it waits."""

    message: Message


Step = Action | Send | Receive


@lru_cache(maxsize=32)
def work(schedule: str, pp: int, stages: int, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """What each of `pp` ranks does in a step, in order. Raises LayoutError where the schedule cannot do it."""
    return with_messages(actions(schedule, pp, stages, microbatches), placement(schedule, pp, stages))


@lru_cache(maxsize=32)
def forward_work(schedule: str, pp: int, stages: int, microbatches: int) -> tuple[tuple[Step, ...], ...]:
    """What each rank does where nothing is learnt: `pp` microbatches at a time through each of its stages."""
    held = placement(schedule, pp, stages)
    groups = [range(first, min(first + pp, microbatches)) for first in range(0, microbatches, pp)]
    lists = [[Action("F", stage, number) for group in groups for stage in own for number in group] for own in held]
    return with_messages(lists, held)


def with_messages(lists: Sequence[Sequence[Action]], held: Sequence[Sequence[int]]) -> tuple[tuple[Step, ...], ...]:
    """`lists` with every rank's sends and receives in their places; `held` says which stages each rank has.

    Between two stages of one rank nothing is sent. Raises ValueError where the lists wait for each other.
    """
    home = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    # At one and the same time computation comes first, so that what it made can be sent.
    events: list[tuple[int, int, Action]] = []
    ends = _ends(lists, len(home))
    for rank, listed in enumerate(lists):
        events += [(ends[action], rank, action) for action in listed]
    events.sort(key=lambda event: event[:2])
    order: list[tuple[int, int, Action | Message]] = [(end, 0, action) for end, _, action in events]
    order += [(end, 1, message) for end, _, action in events for message in messages(action, home)]
    found: list[list[Step]] = [[] for _ in lists]
    for _, _, what in sorted(order, key=lambda one: one[:2]):
        if isinstance(what, Message):
            found[what.source].append(Send(what))
            found[what.target].append(Receive(what))
        else:
            found[home[what.stage]].append(what)
    return tuple(map(tuple, found))


def messages(action: Action, home: dict[int, int]) -> Iterator[Message]:
    """What is sent once `action` is done: nothing, or one message. `home`: the rank of every stage."""
    kind, stage, number = action
    if kind == "W":
        return
    name, neighbour = (ACTIVATION, stage + 1) if kind == "F" else (GRADIENT, stage - 1)
    if neighbour in home and home[neighbour] != home[stage]:
        yield Message(name, stage, number, home[stage], home[neighbour])


def needed(action: Action, stages: int) -> Action | None:
    """The forward or backward, "B" standing for "I" too, whose result `action` takes in, if it takes any."""
    kind, stage, number = action
    if kind == "F":
        return Action("F", stage - 1, number) if stage else None
    if kind == "W":
        return Action("B", stage, number)
    return Action("B", stage + 1, number) if stage + 1 < stages else Action("F", stage, number)


def _ends(lists: Sequence[Sequence[Action]], stages: int) -> dict[Action, int]:
    """When every action ends, in units, where messages take no time."""
    done: dict[Action, int] = {}
    found: dict[Action, int] = {}
    position, free = [0] * len(lists), [0] * len(lists)
    before = -1
    while len(found) != before:
        before = len(found)
        for rank, listed in enumerate(lists):
            while position[rank] < len(listed):
                action = listed[position[rank]]
                before_it = needed(action, stages)
                if before_it is not None and before_it not in done:
                    break
                start = max(free[rank], 0 if before_it is None else done[before_it])
                free[rank] = found[action] = start + UNITS[action.kind]
                done[action._replace(kind="B") if action.kind == "I" else action] = free[rank]
                position[rank] += 1
    stuck = [rank for rank, listed in enumerate(lists) if position[rank] < len(listed)]
    if stuck:
        raise ValueError(f"ranks {stuck} wait for each other; a forward must come before its backward everywhere")
    return found
