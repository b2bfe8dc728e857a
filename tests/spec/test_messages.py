from collections import Counter
from itertools import product

import pytest

from kumi.spec.schedule import actions, illegal_schedule, stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Action
from kumi.spec.sends_and_recvs import (
    Message,
    Receive,
    Send,
    forward_pipeline_steps,
    messages_after,
    pipeline_steps,
    with_sends_and_recvs,
)

STAGES = {name: (2, 3) if one.more_stages else (one.stages,) for name, one in SCHEDULES.items()}
SHAPES = [
    (schedule, pp, stages, microbatches)
    for schedule, pp in product(SCHEDULES, (2, 3, 4, 8))
    for stages in STAGES[schedule]
    for microbatches in (1, 2, 3, 4, 5, 8, 13, 16, 24)
    if illegal_schedule(schedule, pp, stages, microbatches) is None
]


def finished(lists, assignment):
    """Return the number of steps that each rank completes if sends and receives block until their counterpart."""
    position = [0] * len(lists)
    made, moved = set(), True
    while moved:
        moved = False
        for rank, listed in enumerate(lists):
            if position[rank] == len(listed):
                continue
            step = listed[position[rank]]
            if isinstance(step, Action):
                assert missing(step, rank, assignment, made) == []
                made.add((rank, "B" if step.kind == "I" else step.kind, *step[1:]))
            elif isinstance(step, Send):
                kind, stage, number, source, other = step.message
                assert source == rank
                assert (rank, "F" if kind == "activation" else "B", stage, number) in made
                if position[other] == len(lists[other]) or lists[other][position[other]] != Receive(step.message):
                    continue
                made.add((other, "F" if kind == "activation" else "B", stage, number))
                position[other] += 1
            else:
                continue
            position[rank] += 1
            moved = True
    return position


def missing(action, rank, assignment, made):
    """Return the inputs of `action` that `rank` does not have."""
    kind, stage, number = action
    last = sum(map(len, assignment)) - 1
    needed = {"F": [("F", stage - 1)] if stage else [], "W": [("B", stage)]}.get(
        kind, [("F", stage), *([("B", stage + 1)] if stage < last else [])]
    )
    return [one for one in needed if (rank, *one, number) not in made]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nobody_is_stuck_even_where_every_message_blocks_both_its_ranks(schedule):
    shapes = [shape for shape in SHAPES if shape[0] == schedule]
    assert len(shapes) >= 10
    for shape in shapes:
        assignment = stage_assignment(*shape[:3])
        for lists in (pipeline_steps(*shape), forward_pipeline_steps(*shape)):
            assert finished(lists, assignment) == [len(listed) for listed in lists], shape


def test_the_simulator_notices_ranks_that_are_stuck():
    assignment = stage_assignment("1f1b", 2, 1)
    first, second = (list(listed) for listed in pipeline_steps("1f1b", 2, 1, 4))
    swapped = next(i for i, one in enumerate(second) if isinstance(one, Receive) and i > 2)
    sends = [i for i, one in enumerate(second) if isinstance(one, Send)]
    place = max(i for i in sends if i < swapped)
    second[place], second[swapped] = second[swapped], second[place]
    with pytest.raises(AssertionError):
        assert finished((first, second), assignment) == [len(first), len(second)]


@pytest.mark.parametrize("shape", SHAPES[::7], ids=str)
def test_actions_stay_in_the_schedules_order_and_every_message_has_both_ends(shape):
    lists, assignment = pipeline_steps(*shape), stage_assignment(*shape[:3])
    assert [tuple(one for one in listed if isinstance(one, Action)) for listed in lists] == list(actions(*shape))
    home = {stage: rank for rank, stages in enumerate(assignment) for stage in stages}
    expected = Counter(
        message for listed in actions(*shape) for action in listed for message in messages_after(action, home)
    )
    assert Counter(one.message for listed in lists for one in listed if isinstance(one, Send)) == expected
    assert Counter(one.message for listed in lists for one in listed if isinstance(one, Receive)) == expected
    assert set(expected.values()) == {1}


def test_the_turn_of_a_v_sends_nothing():
    sent = [one.message for listed in pipeline_steps("zb-v", 2, 2, 3) for one in listed if isinstance(one, Send)]
    assert {(message.kind, message.stage) for message in sent} == {
        ("activation", 0),
        ("activation", 2),
        ("gradient", 1),
        ("gradient", 3),
    }
    assert all(message.source != message.target for message in sent)


def test_two_ranks_of_one_microbatch():
    first, second = pipeline_steps("1f1b", 2, 1, 1)
    ahead, back = Message("activation", 0, 0, 0, 1), Message("gradient", 1, 0, 1, 0)
    assert first == (Action("F", 0, 0), Send(ahead), Receive(back), Action("B", 0, 0))
    assert second == (Receive(ahead), Action("F", 1, 0), Action("B", 1, 0), Send(back))


def test_lists_that_wait_for_each_other_are_refused():
    wrong = [[Action("B", 0, 0), Action("F", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)]]
    with pytest.raises(ValueError, match=r"deadlocks on ranks \[0, 1\]"):
        with_sends_and_recvs(wrong, [(0,), (1,)])
