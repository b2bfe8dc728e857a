"""Estimates of steps with rollouts follow what the steps before have taken."""

import pytest

from kumi.train.refined_estimates import RefinedEstimates


def step(*, generate=None, train, score=0.0):
    """A metrics entry whose parts have (measured, estimated) seconds."""
    entry = {"time/train_s": train[0], "time/estimated_train_s": train[1]}
    total = train[1] + score
    if generate is not None:
        entry |= {"time/generate_s": generate[0], "time/estimated_generate_s": generate[1]}
        entry |= {"time/log_probs_s": 0.001, "time/estimated_log_probs_s": 0.0}
        total += generate[1]
    return entry | {"perf/estimated_step_s": total}


def test_each_part_is_refined_by_its_own_steps():
    estimates = RefinedEstimates()
    first = estimates.refine(step(generate=(6.0, 2.0), train=(1.0, 2.0)))
    assert first["perf/estimated_step_s"] == first["perf/planned_step_s"] == 4.0
    second = estimates.refine(step(train=(1.0, 4.0)))
    of_training = {"time/planned_train_s": 4.0, "time/estimated_train_s": 2.0}
    assert second == {**of_training, "perf/planned_step_s": 4.0, "perf/estimated_step_s": 2.0}
    # Generation took 3 times its estimate; training 0.5 and 0.25 of it. The seconds of rewards stay as they are.
    third = estimates.refine(step(generate=(3.0, 1.0), train=(1.0, 4.0), score=0.5))
    assert third["time/estimated_generate_s"] == 3.0
    assert third["time/estimated_train_s"] == 1.5
    assert third["perf/estimated_step_s"] == pytest.approx(5.0)
    assert third["perf/planned_step_s"] == 5.5
    assert "time/estimated_log_probs_s" not in third  # nothing is estimated, nothing is refined


def test_a_disturbed_step_changes_no_estimate_and_old_steps_are_forgotten():
    estimates = RefinedEstimates()
    for measured in (2.0, 2.0, 40.0):
        estimates.refine(step(train=(measured, 1.0)))
    assert estimates.refine(step(train=(2.0, 1.0)))["perf/estimated_step_s"] == 2.0
    for _ in range(5):
        estimates.refine(step(train=(3.0, 1.0)))
    assert estimates.refine(step(train=(3.0, 1.0)))["perf/estimated_step_s"] == 3.0


def test_a_resumed_run_has_the_ratios_of_its_metrics():
    estimates, entries = RefinedEstimates(), []
    for number in range(1, 8):
        parts = {"generate": (3.0 * number, 1.0)} if number % 2 else {}
        entry = step(train=(float(number), 2.0), **parts)
        entries.append(entry | estimates.refine(entry))
    # Metrics of other kinds have no estimates; a figure that was not finite is null in the file.
    entries.append({"eval/loss": 1.0, "time/planned_train_s": 2.0, "time/train_s": None})
    following = step(generate=(1.0, 1.0), train=(1.0, 1.0))
    resumed = RefinedEstimates(entries).refine(following)
    assert resumed == estimates.refine(following)
    assert (resumed["time/estimated_generate_s"], resumed["time/estimated_train_s"]) == (12.0, 2.5)


def test_a_device_of_unknown_speed_has_no_estimates():
    assert RefinedEstimates().refine({"time/train_s": 1.0, "perf/estimated_step_s": None}) == {}
