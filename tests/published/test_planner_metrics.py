"""The metrics of the planner's scores agree with figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from planner_metrics import (
    brier,
    constant_of_others,
    coverage,
    mean_abs_error,
    one_constant,
    ranks,
    reliability,
    signed_error,
    spearman,
    top1_regrets,
)


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


def test_coverage_counts_every_experiment_once():
    low, high = np.zeros(5), np.array([1.0, 1.0, 1.0, 1.0, 3.0])
    measured = np.array([0.5, 1.0, 2.0, 0.9, 4.0])
    # Three of four rows of one experiment, none of the other's only row.
    assert coverage(low, high, measured, ["a", "a", "a", "a", "b"]) == pytest.approx(0.375)
    assert coverage(low, high, measured, ["a"] * 5) == pytest.approx(0.6)


def test_brier_s_score_of_certainty_of_doubt_and_of_error():
    outcome = np.array([True, False])
    assert brier(np.array([1.0, 0.0]), outcome) == 0.0
    assert brier(np.array([0.5, 0.5]), outcome) == 0.25
    assert brier(np.array([0.0, 0.8]), outcome) == pytest.approx(0.82)


def test_reliability_is_the_share_that_came_true_in_each_part():
    table = reliability(np.array([0.05, 0.15, 0.1, 1.0, 0.95]), np.array([False, False, True, True, False]), 10)
    assert [(row["low"], row["rows"], row["share"]) for row in table] == [(0.0, 1, 0.0), (0.1, 2, 0.5), (0.9, 2, 0.5)]
    assert table[-1]["high"] == 1.0
    assert table[1]["probability"] == pytest.approx(0.125)


def test_a_constant_of_others_knows_nothing_of_the_rows_it_predicts():
    flops, peaks = np.full(4, 100.0), np.array([100.0, 100.0, 100.0, 200.0])
    measured = np.array([2.0, 4.0, 5.0, 1.0])
    devices, experiments = ["a100", "a100", "a100", "h100"], ["one", "one", "two", "three"]
    # One's shares of the peak are 0.5 and 0.25, two's 0.2, three's 0.5. No other has an H100: the median of the rest.
    predicted = constant_of_others(flops, measured, peaks, devices, experiments)
    assert predicted == pytest.approx([5.0, 5.0, 1 / 0.375, 100 / (np.median([0.375, 0.2]) * 200)])
    again = constant_of_others(flops, measured * [1, 1, 1, 9], peaks, devices, experiments)
    assert again[3] == pytest.approx(predicted[3])
    assert np.isnan(constant_of_others(flops, measured, peaks, devices, ["one"] * 4)).all()
