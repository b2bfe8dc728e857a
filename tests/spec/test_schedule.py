from collections import Counter
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kumi.errors import LayoutError
from kumi.spec.schedule import actions, illegal_schedule, rank_program, stage_assignment
from kumi.spec.schedules import FORWARDS_FIRST, IN_ROUNDS, SCHEDULES, V_SHAPED
from kumi.spec.schedules.schedule_record import Action

STAGES = {name: (2, 3, 4) if one.more_stages else (one.stages,) for name, one in SCHEDULES.items()}
SHAPES = [
    (schedule, pp, stages, microbatches)
    for schedule in SCHEDULES
    for pp in range(1, 9)
    for stages in STAGES[schedule]
    for microbatches in (1, 2, 3, 5, 8, 13, 16, 24)
    if illegal_schedule(schedule, pp, stages, microbatches) is None
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_list_runs_to_its_end_and_does_everything_once(schedule):
    shapes = [shape for shape in SHAPES if shape[0] == schedule]
    assert len(shapes) > 20
    for _, pp, stages, microbatches in shapes:
        check(actions(schedule, pp, stages, microbatches), stage_assignment(schedule, pp, stages), microbatches)


def check(lists, assignment, microbatches):
    """Run the lists, each action after its dependencies, and check that every action ran once and in order."""
    last = sum(map(len, assignment)) - 1
    done, position = set(), [0] * len(lists)
    before = -1
    while len(done) != before:
        before = len(done)
        for rank, listed in enumerate(lists):
            while position[rank] < len(listed) and needs(listed[position[rank]], last) <= done:
                action = listed[position[rank]]
                assert action.stage in assignment[rank]
                assert action not in done
                done |= {action, Action("I", *action[1:]), Action("W", *action[1:])} if action.kind == "B" else {action}
                position[rank] += 1
    assert position == [len(listed) for listed in lists]
    pairs = [(stage, number) for stage in range(last + 1) for number in range(microbatches)]
    assert done - {one for one in done if one.kind == "B"} == {Action(kind, *pair) for kind in "FIW" for pair in pairs}
    count = Counter((kind, *rest) for listed in lists for kind, *rest in listed)
    assert all(count["B", *pair] + count["I", *pair] == 1 and count["I", *pair] == count["W", *pair] for pair in pairs)


def needs(action, last):
    """Return the actions that must be done before `action`."""
    kind, stage, number = action
    if kind == "F":
        return {Action("F", stage - 1, number)} if stage else set()
    if kind == "W":
        return {Action("I", stage, number)}
    return {Action("F", stage, number)} | ({Action("I", stage + 1, number)} if stage < last else set())


def test_one_rank_and_one_microbatch_are_a_plain_step():
    for schedule in ("1f1b", "gpipe"):
        assert actions(schedule, 1, 1, 1) == ((Action("F", 0, 0), Action("B", 0, 0)),)


def test_four_ranks_of_1f1b_take_turns():
    first, *_, last = ("".join(f"{one.kind}{one.microbatch}" for one in rank) for rank in actions("1f1b", 4, 1, 5))
    assert first == "F0F1F2F3B0F4B1B2B3B4"
    assert last == "F0B0F1B1F2B2F3B3F4B4"


def test_stages_are_dealt_in_rounds_or_down_and_back():
    assert stage_assignment("interleaved", 3, 2) == ((0, 3), (1, 4), (2, 5))
    assert all(stage_assignment(schedule, 3, 2) == ((0, 5), (1, 4), (2, 3)) for schedule in V_SHAPED)


@given(
    some.sampled_from([name for name in SCHEDULES if name not in FORWARDS_FIRST]),
    some.integers(1, 6),
    some.integers(2, 4),
)
def test_more_microbatches_only_repeat_the_block(schedule, pp, stages):
    stages = stages if SCHEDULES[schedule].more_stages else SCHEDULES[schedule].stages
    size = pp if schedule in IN_ROUNDS else 1
    for rank in range(pp):
        few, more = (rank_program(schedule, pp, stages, 6 * pp + extra * size, rank) for extra in (0, 3))
        assert more.repeats == few.repeats + 3
        assert (more.warmup, more.steady, more.cooldown) == (few.warmup, few.steady, few.cooldown)
        assert Counter(kind for kind, _ in few.steady)["F"] == size * stages


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (("zb-v", 4, 1, 8), "schedule='zb-v' needs 2 stages per rank, not stages=1; set stages = 2"),
        (("1f1b", 4, 2, 8), "schedule='1f1b' needs 1 stage per rank, not stages=2; set stages = 1"),
        (("interleaved", 4, 1, 8), "schedule='interleaved' needs 2 or more stages per rank, not stages=1"),
        (
            ("interleaved", 4, 2, 6),
            "runs microbatches in groups of pp=4, which does not divide the 6 microbatches of a step",
        ),
        (("dualpipe", 4, 2, 7), "schedule='dualpipe' needs at least 2 x pp = 8 microbatches per step, not 7"),
        (
            ("zb", 4, 2, 7),
            "schedule='zb' is unknown; use one of 1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, dualpipe",
        ),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(shape, sentence):
    assert sentence in illegal_schedule(*shape)
    with pytest.raises(LayoutError):
        actions(*shape)


# The same orders in PyTorch.

PYTORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipe": "DualPipeV",
    "zb-h1": "InterleavedZeroBubble",
}


def pytorch_order(schedule, pp, stages, microbatches):
    """The computations of every rank in PyTorch's schedule, a forward before the backward that it overlaps with."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, pp, None, pp * stages
    kind = get_schedule_class(PYTORCH[schedule])
    order = kind(stage if issubclass(kind, PipelineScheduleSingle) else [stage] * stages, microbatches).pipeline_order
    return tuple(
        tuple(
            Action(one.computation_type.value, one.stage_index, one.microbatch_index)
            for action in order[rank]
            if action is not None
            for one in (action.sub_actions or (action,))
            if one.computation_type.value in "FBIW"
        )
        for rank in range(pp)
    )


@pytest.mark.parametrize("schedule", [name for name in PYTORCH if name != "1f1b"])
def test_the_order_is_that_of_pytorch(schedule):
    shapes = [shape for shape in SHAPES if shape[0] == schedule and shape[1] in (2, 3, 4)]
    if schedule == "zb-h1":  # PyTorch takes microbatches in equal rounds of pp or more
        shapes = [shape for shape in shapes if shape[3] % max(1, shape[3] // shape[1]) == 0]
    assert len(shapes) > 8
    for shape in shapes:
        assert actions(*shape) == pytorch_order(*shape), shape


def test_the_order_of_1f1b_is_that_of_pytorch_but_for_the_last_rank():
    """PyTorch lists the last rank's forwards from microbatch 1 on, for pictures; it runs another list."""
    for pp, microbatches in ((2, 2), (2, 5), (4, 4), (4, 9), (8, 8), (8, 20)):
        assert actions("1f1b", pp, 1, microbatches)[:-1] == pytorch_order("1f1b", pp, 1, microbatches)[:-1]
