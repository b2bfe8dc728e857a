"""The metrics of the planner's scores agree with figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from planner_metrics import mean_abs_error, one_constant, ranks, signed_error, spearman, top1_regrets


def test_errors_are_relative_to_what_was_measured():
    predicted, measured = np.array([1.1, 1.6]), np.array([1.0, 2.0])
    assert mean_abs_error(predicted, measured) == pytest.approx(0.15)
    assert signed_error(predicted, measured) == pytest.approx(-0.05)


def test_equal_values_share_their_rank():
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]


def test_ranks_are_compared_inside_groups_only():
    measured = np.array([1.0, 2.0, 3.0, 10.0, 20.0, 30.0])
    keys = ["a"] * 3 + ["b"] * 3
    assert spearman(measured, measured, keys) == (pytest.approx(1.0), 6)
    assert spearman(-measured, measured, keys)[0] == pytest.approx(-1.0)
    # The second group is in order in spite of its smaller numbers; the first is half wrong: (0.5 x 2 + 1 x 2) / 4.
    assert spearman(np.array([9.0, 8.0, 9.5, 1.0, 2.0, 3.0]), measured, keys)[0] == pytest.approx(0.75)


def test_groups_too_small_or_all_equal_are_not_ranked():
    assert spearman(np.array([1.0, 2.0]), np.array([1.0, 2.0]), ["a", "a"]) == (None, 0)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.ones(3), ["a"] * 3) == (None, 0)
    assert spearman(np.ones(3), np.array([1.0, 2.0, 3.0]), ["a"] * 3) == (0.0, 3)


def test_regret_is_what_the_chosen_row_costs_over_the_best():
    predicted = np.array([1.0, 2.0, 5.0, 5.0, 7.0])
    measured = np.array([3.0, 2.0, 4.0, 6.0, 1.0])
    # Two rows with equal predictions are each chosen half of the time; a group of one has no choice.
    assert top1_regrets(predicted, measured, ["a", "a", "b", "b", "c"]).tolist() == [0.5, 0.25]
    assert not len(top1_regrets(predicted[:1], measured[:1], ["a"]))


def test_the_simplest_model_reaches_the_median_speed_of_its_key():
    flops, measured = np.array([10.0, 20.0, 30.0, 8.0]), np.array([1.0, 1.0, 1.0, 2.0])
    assert one_constant(flops, measured, ["a", "a", "a", "b"]).tolist() == [0.5, 1.0, 1.5, 2.0]
