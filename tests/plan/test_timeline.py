import pytest
from hypothesis import given
from hypothesis import strategies as some

from kumi.plan.pipeline.timeline import makespan, simulate
from kumi.spec.schedule import actions, rank_program, stage_assignment
from kumi.spec.schedules import FORWARDS_FIRST, IN_ROUNDS, SCHEDULES
from kumi.spec.schedules.schedule_record import Action

SMALL = some.integers(1, 6)


def run(schedule, pp, stages, microbatches, durations, transfer=0.0, **how):
    lists, stages_of_rank = actions(schedule, pp, stages, microbatches), stage_assignment(schedule, pp, stages)
    return simulate(lists, stages_of_rank, durations, transfer, **how)


def test_two_ranks_by_hand():
    """Rank 0 runs F0 at 0-1 and F1 at 1-2, then waits for B0: rank 1 ends it at 1.5 + 2 + 4 and sends it in 0.5 s."""
    timeline = run("1f1b", 2, 1, 2, [(1, 2, 1), (2, 3, 1)], 0.5)
    assert [(*span.action, span.start, span.end) for span in timeline.spans[0]] == [
        ("F", 0, 0, 0, 1),
        ("F", 0, 1, 1, 2),
        ("B", 0, 0, 8, 11),
        ("B", 0, 1, 14, 17),
    ]
    assert [(span.start, span.end) for span in timeline.spans[1]] == [(1.5, 3.5), (3.5, 7.5), (7.5, 9.5), (9.5, 13.5)]
    assert (timeline.seconds, timeline.busy, timeline.idle, timeline.longest_rank_seconds) == (17, (8, 12), (9, 5), 17)


def test_messages_between_two_ranks_are_sent_one_at_a_time():
    timeline = run("gpipe", 2, 1, 3, [(1, 1, 1)] * 2, 2.0)
    assert [span.start for span in timeline.spans[1]] == [3, 5, 7, 8, 10, 12]


def test_blocking_transfers_delay_the_computation_of_the_sender():
    overlapped = run("gpipe", 2, 1, 3, [(1, 1, 1)] * 2, 1.0)
    blocking = run("gpipe", 2, 1, 3, [(1, 1, 1)] * 2, 1.0, blocking=True)
    assert [span.start for span in overlapped.spans[0]] == [0, 1, 2, 8, 10, 12]
    assert [span.start for span in blocking.spans[0]] == [0, 2, 4, 10, 13, 16]


def test_nothing_is_sent_within_a_rank():
    durations = [(1, 1, 1)] * 4
    assert run("zb-v", 2, 2, 1, durations, [5, 100, 7]).seconds == run("zb-v", 2, 2, 1, durations, [5, 0, 7]).seconds


def test_each_boundary_needs_a_transfer():
    with pytest.raises(ValueError, match="2 transfers for the 3 boundaries of 4 stages"):
        run("zb-v", 2, 2, 1, [(1, 1, 1)] * 4, [1.0, 2.0])


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ([[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], r"ranks \[0, 1\] wait for each other"),
        ([[("F", 0, 1), ("F", 0, 0)], []], "microbatches in ascending order"),
    ],
)
def test_lists_that_cannot_be_run_are_refused(lists, words):
    with pytest.raises(ValueError, match=words):
        simulate([[Action(*fields) for fields in rank] for rank in lists], [[0], [1]], [(1, 1, 1)] * 2)


# The bubbles in the papers: seconds of a step beyond the work of a rank, as functions of a stage's F, I and W.


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1, 1, 1), (3, 2, 2), (2, 2, 3), (2, 4, 1)])
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_bubbles_agree_with_the_papers(forward, inputs, weights, pp):
    work, m = forward + inputs + weights, 4 * pp

    def bubble(schedule, stages=1, longest=False):
        durations = [(forward / stages, inputs / stages, weights / stages)] * (pp * stages)
        timeline = run(schedule, pp, stages, m, durations)
        return (timeline.longest_rank_seconds if longest else timeline.seconds) - m * work

    assert bubble("gpipe") == pytest.approx((pp - 1) * work)
    assert bubble("1f1b") == pytest.approx((pp - 1) * work)
    assert bubble("interleaved", 3) == pytest.approx((pp - 1) * work / 3)
    # The zero-bubble papers count from a rank's first action to its last.
    assert bubble("zb-h1", longest=True) == pytest.approx((pp - 1) * max(forward, inputs, forward + inputs - weights))
    assert bubble("zb-h2", longest=True) == pytest.approx((pp - 1) * max(0, forward + inputs - 2 * weights))


@pytest.mark.parametrize("pp", [2, 4, 7])
def test_v_shaped_schedules_have_almost_no_bubble_if_all_actions_are_equally_long(pp):
    durations, m = [(0.5, 0.5, 0.5)] * (2 * pp), 4 * pp
    assert run("zb-v", pp, 2, m, durations).longest_rank_seconds == pytest.approx(3 * m)
    # (PP / 2 - 1) (F&B + B - 3 W) over PP = 2 pp stages, where a pair's backward waits for its forward, is the most.
    assert 3 * m < run("dualpipe", pp, 2, m, durations).seconds <= 3 * m + (pp - 1) * (1.5 + 1.0 - 1.5)


def test_the_bubble_of_four_ranks_and_eight_microbatches_is_27_percent_of_the_step():
    timeline = run("1f1b", 4, 1, 8, [(1, 1, 1)] * 4)
    assert sum(timeline.idle) / (4 * timeline.seconds) == pytest.approx(0.273, abs=5e-4)


# Repeated blocks are skipped.


@some.composite
def pipelines(draw):
    schedule = draw(some.sampled_from(sorted(SCHEDULES)))
    stages = SCHEDULES[schedule].stages + (draw(some.integers(0, 2)) if SCHEDULES[schedule].more_stages else 0)
    pp = draw(some.integers(1, 5))
    microbatches = draw(some.integers(2, 15)) * pp + (0 if schedule in IN_ROUNDS else draw(some.integers(0, 4)))
    return schedule, pp, stages, microbatches


@given(pipelines(), SMALL, SMALL, SMALL, some.sampled_from([0.0, 0.3, 1.0, 7.0]), some.booleans())
def test_the_length_of_equal_stages_is_that_of_the_timeline(shape, forward, inputs, weights, transfer, blocking):
    durations = [(forward, inputs, weights)] * (shape[1] * shape[2])
    expected = run(*shape, durations, transfer, blocking=blocking).seconds
    assert makespan(*shape, durations, transfer, blocking=blocking) == pytest.approx(expected, rel=1e-10)


@given(pipelines(), some.data())
def test_the_length_of_unequal_stages_and_transfers_is_that_of_the_timeline(shape, data):
    count = shape[1] * shape[2]
    durations = data.draw(some.lists(some.tuples(SMALL, SMALL, SMALL), min_size=count, max_size=count))
    transfers = data.draw(some.lists(some.floats(0, 3), min_size=count - 1, max_size=count - 1))
    expected = run(*shape, durations, transfers).seconds
    assert makespan(*shape, durations, transfers) == pytest.approx(expected, rel=1e-10)


def test_a_slow_stage_that_overtakes_another_late_is_waited_for():
    """For thirty microbatches the second rank's short work and long path decide, then the first rank's slower pace."""
    durations = [(1.02, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 1.0, 0.0), (0.2, 0.2, 0.0)]
    for microbatches in (10, 40, 400):
        expected = run("1f1b", 4, 1, microbatches, durations, 0.004).seconds
        assert makespan("1f1b", 4, 1, microbatches, durations, 0.004) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in FORWARDS_FIRST])
def test_no_action_of_a_block_needs_more_than_the_blocks_it_may_reach_back(schedule):
    record = SCHEDULES[schedule]
    for pp in range(2, 7):
        for stages in range(record.stages, record.stages + 1 + record.more_stages):
            assert reach(schedule, pp, stages, 8 * pp) <= record.reach


def reach(schedule, pp, stages, microbatches):
    """Return how many blocks back the farthest dependency of any action in or after the blocks is.

    All actions before the first block count as one block.
    """
    patterns = [rank_program(schedule, pp, stages, microbatches, rank) for rank in range(pp)]
    least = min(program.repeats for program in patterns)
    block, last = {}, pp * stages - 1
    for program, listed in zip(patterns, actions(schedule, pp, stages, microbatches), strict=True):
        for position, (kind, *pair) in enumerate(listed):
            number = (position - len(program.warmup)) // len(program.steady)
            block["B" if kind == "I" else kind, *pair] = max(-1, min(number, least))
    far = 0
    for (kind, stage, microbatch), number in block.items():
        if kind == "F" and stage:
            far = max(far, number - block["F", stage - 1, microbatch])
        if kind == "B":
            far = max(far, number - block["B", stage + 1, microbatch] if stage < last else 0)
    return far
