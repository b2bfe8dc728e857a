from itertools import pairwise

import pytest

from kumi.spec.optim import Optim


def rates(steps=100, **options):
    optim = Optim(lr=1.0, warmup_steps=10, min_lr_ratio=0.1, **options)
    return [optim.lr_at(step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_warm_up_is_linear_and_never_zero(schedule):
    assert rates(schedule=schedule)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decays_end_at_the_floor_and_never_rise(schedule):
    curve = rates(schedule=schedule)
    assert curve[10] == pytest.approx(1.0)
    assert curve[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in pairwise(curve[10:]))


def test_wsd_stays_and_then_falls():
    curve = rates(schedule="wsd", decay_steps=20)
    assert set(curve[10:81]) == {1.0}
    assert curve[-1] == pytest.approx(0.1)
    assert curve[90] == pytest.approx(1.0 - 0.9 * 10 / 19)


def test_wsd_ends_at_the_floor_even_when_it_falls_in_one_step():
    assert rates(schedule="wsd", decay_steps=1)[-2:] == [1.0, pytest.approx(0.1)]
    assert Optim(lr=1.0, schedule="wsd", decay_steps=1).lr_at(0, 1) == 1.0


def test_a_run_of_one_step_has_a_rate():
    assert Optim(lr=1.0).lr_at(0, 1) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_of_one_step_ends_at_the_floor(schedule):
    optim = Optim(lr=1.0, warmup_steps=9, min_lr_ratio=0.1, schedule=schedule)
    assert [optim.lr_at(step, 10) for step in (8, 9)] == [1.0, pytest.approx(0.1)]
