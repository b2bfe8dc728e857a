"""The messages between the ranks of a pipeline, in one order for all ranks.

A schedule lists the actions of each rank. Between neighbouring stages on different ranks, activations go forward and
gradients go back. NCCL runs the sends and receives of a rank in the order in which they are posted, so two ranks that
post the same two messages in different orders would wait for each other forever. To exclude that, this module simulates
the schedule and sorts all messages by the time at which their sender finishes computing them. In this global order each
action comes after its inputs, so no rank can be stuck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from kumi.spec.schedule import actions, stage_assignment
from kumi.spec.schedules.schedule_record import Action

# Durations in the simulation: forward, input gradient, weight gradient and full backward.
_DURATIONS = {"F": 1, "I": 1, "W": 1, "B": 2}
ACTIVATION, GRADIENT = "activation", "gradient"


class Message(NamedTuple):
    """A tensor of one microbatch from pipeline rank `source` to `target`: the hidden states that `stage` returned
    ("activation"), or the gradient of its input ("gradient")."""

    kind: str
    stage: int
    microbatch: int
    source: int
    target: int


class Send(NamedTuple):
    """The rank posts the send of a message, after the action that computes the message."""

    message: Message


class Receive(NamedTuple):
    """The rank posts the receive of a message; the action that needs it waits for it."""

    message: Message


PipelineStep = Action | Send | Receive


@lru_cache(maxsize=32)
def pipeline_steps(schedule: str, pp: int, stages: int, microbatches: int) -> tuple[tuple[PipelineStep, ...], ...]:
    """Return the actions, sends and receives of each of `pp` ranks in a step. Raise LayoutError if `schedule` cannot
    run these stages or microbatches."""
    return with_sends_and_recvs(actions(schedule, pp, stages, microbatches), stage_assignment(schedule, pp, stages))


@lru_cache(maxsize=32)
def forward_pipeline_steps(
    schedule: str, pp: int, stages: int, microbatches: int
) -> tuple[tuple[PipelineStep, ...], ...]:
    """Return the forwards, sends and receives of each rank in evaluation: `pp` microbatches in turn through each
    stage."""
    assignment = stage_assignment(schedule, pp, stages)
    groups = [range(first, min(first + pp, microbatches)) for first in range(0, microbatches, pp)]
    lists = [
        [Action("F", stage, microbatch) for group in groups for stage in own for microbatch in group]
        for own in assignment
    ]
    return with_sends_and_recvs(lists, assignment)


def with_sends_and_recvs(
    lists: Sequence[Sequence[Action]], assignment: Sequence[Sequence[int]]
) -> tuple[tuple[PipelineStep, ...], ...]:
    """Return `lists` with the sends and receives of each rank inserted; `assignment` has the stages of each rank.

    Two stages of one rank exchange no messages. Raise ValueError if the lists deadlock.
    """
    home = {stage: rank for rank, stages in enumerate(assignment) for stage in stages}
    # At equal times, actions come before messages, because a message is sent after the action that computes it.
    events: list[tuple[int, int, Action]] = []
    ends = _ends(lists, len(home))
    for rank, listed in enumerate(lists):
        events += [(ends[action], rank, action) for action in listed]
    events.sort(key=lambda event: event[:2])
    order: list[tuple[int, int, Action | Message]] = [(end, 0, action) for end, _, action in events]
    order += [(end, 1, message) for end, _, action in events for message in messages_after(action, home)]
    steps: list[list[PipelineStep]] = [[] for _ in lists]
    for _, _, item in sorted(order, key=lambda entry: entry[:2]):
        if isinstance(item, Message):
            steps[item.source].append(Send(item))
            steps[item.target].append(Receive(item))
        else:
            steps[home[item.stage]].append(item)
    return tuple(map(tuple, steps))


def messages_after(action: Action, home: dict[int, int]) -> Iterator[Message]:
    """Yield the message that is sent after `action`, if any. `home`: stage -> rank."""
    kind, stage, microbatch = action
    if kind == "W":
        return
    name, neighbour = (ACTIVATION, stage + 1) if kind == "F" else (GRADIENT, stage - 1)
    if neighbour in home and home[neighbour] != home[stage]:
        yield Message(name, stage, microbatch, home[stage], home[neighbour])


def dependency(action: Action, stages: int) -> Action | None:
    """Return the action whose result `action` needs, or None. "B" stands for an input gradient "I" as well."""
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage - 1, microbatch) if stage else None
    if kind == "W":
        return Action("B", stage, microbatch)
    return Action("B", stage + 1, microbatch) if stage + 1 < stages else Action("F", stage, microbatch)


def _ends(lists: Sequence[Sequence[Action]], stages: int) -> dict[Action, int]:
    """Return the end time of each action in the simulation, where messages take no time."""
    done: dict[Action, int] = {}
    ends: dict[Action, int] = {}
    position, free = [0] * len(lists), [0] * len(lists)
    ended = -1
    while len(ends) != ended:
        ended = len(ends)
        for rank, listed in enumerate(lists):
            while position[rank] < len(listed):
                action = listed[position[rank]]
                needed = dependency(action, stages)
                if needed is not None and needed not in done:
                    break
                start = max(free[rank], 0 if needed is None else done[needed])
                free[rank] = ends[action] = start + _DURATIONS[action.kind]
                done[action._replace(kind="B") if action.kind == "I" else action] = free[rank]
                position[rank] += 1
    stuck = [rank for rank, listed in enumerate(lists) if position[rank] < len(listed)]
    if stuck:
        raise ValueError(
            f"the schedule deadlocks on ranks {stuck}; each forward must come before its backward on all ranks"
        )
    return ends
