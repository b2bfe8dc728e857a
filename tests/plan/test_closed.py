"""The closed forms agree with simulations of the action lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kumi.plan.layout_batch import CHOICES
from kumi.plan.pipeline.closed_forms import closed_form
from kumi.plan.pipeline.timeline import makespan
from kumi.spec.schedule import stage_assignment
from kumi.spec.schedules import SCHEDULES

SECONDS = some.floats(0.5, 3.0)
RATIO = some.floats(0.6, 1.6)
NUMBER = CHOICES["schedule"].index


@some.composite
def shapes(draw, least=1):
    """Draw (schedule, pp, stages, microbatches), with at least `least` x pp microbatches."""
    schedule = draw(some.sampled_from(sorted(SCHEDULES)))
    record = SCHEDULES[schedule]
    stages = record.stages + (draw(some.integers(0, 2)) if record.more_stages else 0)
    pp = draw(some.integers(1, 7))
    least = pp * max(least, record.least_per_rank, 1)
    step = pp if record.in_rounds else 1
    return schedule, pp, stages, least + step * draw(some.integers(0, 20))


def closed(shape, durations, transfer=0.0, *, blocking=False):
    schedule, pp, stages, microbatches = shape
    ranks = [np.sum([durations[stage] for stage in own], axis=0) for own in stage_assignment(schedule, pp, stages)]
    codes = [np.array([number]) for number in (NUMBER(schedule), pp, stages, microbatches)]
    all_ranks, busiest = np.sum(ranks, axis=0)[:, None], max(ranks, key=sum)[:, None]
    return closed_form(*codes, all_ranks, busiest, np.array([transfer]), blocking=blocking)[0]


@given(shapes(least=2), SECONDS, SECONDS, SECONDS, some.floats(0, 1 / 3))
def test_equal_stages_are_exact_with_transfers_of_up_to_a_third_of_an_action(shape, forward, inputs, weights, part):
    schedule, pp, stages, microbatches = shape
    durations, transfer = [(forward, inputs, weights)] * (pp * stages), part * min(forward, inputs, weights)
    expected = makespan(schedule, pp, stages, microbatches, durations, transfer)
    assert closed(shape, durations, transfer) == pytest.approx(expected, rel=1e-9)


@given(shapes(), SECONDS, SECONDS, SECONDS)
def test_equal_stages_are_exact_with_few_microbatches_for_all_but_zb_v(shape, forward, inputs, weights):
    schedule, pp, stages, microbatches = shape
    durations = [(forward, inputs, weights)] * (pp * stages)
    expected = makespan(schedule, pp, stages, microbatches, durations)
    near = 0.15 if schedule == "zb-v" and microbatches < 2 * pp - 1 else 1e-9
    assert closed(shape, durations) == pytest.approx(expected, rel=near)


@given(shapes(least=2), RATIO, RATIO, RATIO, RATIO, some.floats(0, 0.2))
def test_unequal_first_and_last_stages_are_within_a_sixth(shape, inputs, weights, first, last, transfer):
    schedule, pp, stages, microbatches = shape
    inner = np.array([1.0, inputs, weights])
    durations = [first * inner, *[inner] * (pp * stages - 2), last * inner][: pp * stages]
    expected = makespan(schedule, pp, stages, microbatches, durations, transfer)
    assert closed(shape, durations, transfer) == pytest.approx(expected, rel=1 / 6)


@given(shapes(least=2), SECONDS, some.floats(0, 0.3))
def test_blocking_transfers_are_within_a_tenth(shape, work, transfer):
    schedule, pp, stages, microbatches = shape
    durations = [(work, work, work)] * (pp * stages)
    expected = makespan(schedule, pp, stages, microbatches, durations, transfer * work, blocking=True)
    assert closed(shape, durations, transfer * work, blocking=True) == pytest.approx(expected, rel=0.1)


@given(shapes(least=2), some.floats(0.5, 20))
def test_links_slower_than_the_stages_are_within_a_quarter(shape, transfer):
    schedule, pp, stages, microbatches = shape
    durations = [(1.0, 1.2, 0.9)] * (pp * stages)
    expected = makespan(schedule, pp, stages, microbatches, durations, transfer)
    assert closed(shape, durations, transfer) == pytest.approx(expected, rel=0.25)


def test_rows_may_have_different_schedules():
    shapes = [("1f1b", 4, 1, 8), ("zb-v", 2, 2, 8), ("gpipe", 1, 1, 3), ("1f1b", 2, 1, 4), ("interleaved", 4, 2, 8)]
    codes = np.array([(NUMBER(name), *rest) for name, *rest in shapes]).T
    ones = [np.ones(5), np.ones(5), np.ones(5)]
    times = closed_form(*codes, [side * codes[1] for side in ones], ones, np.full(5, 0.1))
    for shape, seconds in zip(shapes, times, strict=True):
        assert seconds == pytest.approx(closed(shape, [(1 / shape[2],) * 3] * (shape[1] * shape[2]), 0.1))


def test_the_bubble_of_four_ranks_and_eight_microbatches_is_27_percent_of_the_step():
    seconds = closed(("1f1b", 4, 1, 8), [(1.0, 1.0, 1.0)] * 4)
    assert 1 - 8 * 3 / seconds == pytest.approx(3 / 11)
