"""Intervals, P(fits) and margins from the errors on published runs."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from small import HOST, job, model

from kumi.config import job as job_of_config
from kumi.config import load_plan
from kumi.errors import ConfigError
from kumi.plan.search.search_layouts import search
from kumi.plan.session import plan
from kumi.plan.uncertainty import intervals
from kumi.plan.uncertainty.error_table import PublishedRun, csv_row, published_runs, sample_of
from kumi.plan.uncertainty.extrapolation import extrapolation
from kumi.plan.uncertainty.intervals import EXTRAPOLATED_WIDTH, fit_probability, interval, nearest_runs, uncertainty
from kumi.plan.uncertainty.margin import FIT_PROBABILITY, margin_for, memory_margin
from kumi.plan.uncertainty.traits import RunTraits, run_traits
from kumi.spec.layout import Layout

TRAITS = RunTraits("fsdp", False, "none", "GPU", 8, 8e9, 4096, 0.1)
RUN_FILE = "[model]\nsource='examples/models/llama-3-8b'\ninit='random'\n[cluster]\nsource='h100-sxm'\n[batch]\n"


def runs_of(errors, experiment, **traits):
    """Return runs of an experiment with these errors of time and memory."""
    return [
        PublishedRun(f"{experiment}-{i}", experiment, "a model", replace(TRAITS, **traits), error, error)
        for i, error in enumerate(errors)
    ]


SPREAD = [
    *runs_of(np.linspace(-0.2, 0.0, 100), "low"),
    *runs_of(np.linspace(0.0, 0.2, 40), "high"),
    *runs_of(np.linspace(0.2, 0.3, 30), "higher"),
]


def share_below(sample, error):
    return sample.weights[sample.errors <= error].sum()


def test_every_experiment_weighs_the_same_however_many_runs_it_has():
    sample = sample_of(SPREAD, "time", "dense")
    assert sample.experiments == 3
    assert share_below(sample, 0.0) == pytest.approx(1 / 3 + 1 / 3 / 40)
    assert share_below(sample, 0.199) == pytest.approx(2 / 3, abs=0.01)


def test_an_experiment_of_few_runs_weighs_less():
    few = [*SPREAD, *runs_of([1.0] * 2, "few")]
    assert 1 - share_below(sample_of(few, "time", "dense"), 0.9) == pytest.approx(0.1 / 3.1)


def test_an_interval_contains_its_share_of_the_errors_and_the_estimate():
    sample = sample_of(SPREAD, "time", "dense")
    for level in (0.5, 0.8, 0.9):
        bounds = interval(sample, level)
        inside = sample.weights[(sample.errors >= log(bounds.low)) & (sample.errors <= log(bounds.high))].sum()
        assert inside >= level - 0.02
    assert interval(sample, 0.8).low > interval(sample, 0.9).low
    slow = sample_of(runs_of(np.linspace(0.1, 0.3, 30), "slow"), "time", "dense")
    assert interval(slow, 0.9).low == 1.0


@pytest.mark.parametrize("ratio", [3.0, 1 / 3])
def test_an_error_that_a_refit_left_widens_intervals_on_its_side_only(ratio):
    """They neither begin nor end at the estimate: the error may recur or not."""
    sample = sample_of(SPREAD, "time", "dense")
    plain, left = interval(sample, 0.8), interval(sample.shifted(log(ratio)), 0.8, remaining=log(ratio))
    assert left.low == pytest.approx(plain.low * min(1.0, ratio))
    assert left.high == pytest.approx(plain.high * max(1.0, ratio))
    assert left.low < 1.0 < left.high


def test_a_regime_of_too_few_experiments_takes_the_errors_of_all():
    runs = [*SPREAD, *runs_of([0.5] * 50, "experts", experts=True)]
    assert sample_of(runs, "time", "experts").regime == ""
    assert len(sample_of(runs, "time", "experts").errors) == len(runs)
    assert sample_of(runs, "time", "dense").regime == "dense"


def test_the_regime_of_a_plan():
    assert TRAITS.time_regime == "dense"
    assert replace(TRAITS, experts=True).time_regime == "experts"
    assert replace(TRAITS, experts=True, communication=0.4).time_regime == "communication-bound"
    traits = run_traits(job(of=model(experts=4)), Layout(dp_shard=8, cp=2), {"forward": 1.0, "tp": 0.5, "bubble": 0.5})
    assert (traits.communication, traits.experts, traits.techniques) == (0.25, True, ("context parallelism",))


def test_a_plan_beyond_the_published_runs_has_wider_intervals_and_says_why(monkeypatch):
    monkeypatch.setattr(intervals, "published_runs", lambda: SPREAD)
    monkeypatch.setattr(intervals, "machine_errors", lambda quantity, *_: sample_of(SPREAD, quantity, "dense"))
    inside = uncertainty(TRAITS, 2.0, 50.0, 80.0, 0.1)
    assert inside.extrapolated == ""
    outside = uncertainty(replace(TRAITS, devices=1000), 2.0, 50.0, 80.0, 0.1)
    assert "more than 8 devices" in outside.extrapolated
    assert log(outside.time90.high / 2.0) == pytest.approx(EXTRAPOLATED_WIDTH * log(inside.time90.high / 2.0))
    assert outside.memory80.low < inside.memory80.low
    assert "no published run is on X" in extrapolation(replace(TRAITS, device="X"), SPREAD)
    assert "no published run uses LoRA" in extrapolation(replace(TRAITS, techniques=("LoRA",)), SPREAD)


def test_the_probability_to_fit_falls_with_the_estimate():
    sample = sample_of(SPREAD, "memory", "fsdp")
    chances = [fit_probability(sample, memory, 80.0) for memory in (20.0, 60.0, 70.0, 80.0, 90.0, 200.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.999
    assert chances[-1] < 0.001


@pytest.mark.parametrize("probability", [0.5, 0.8, 0.9, 0.95])
def test_a_margin_leaves_room_for_the_error_that_it_is_made_for(probability):
    sample = sample_of(SPREAD, "memory", "fsdp")
    margin = margin_for(sample, probability)
    assert margin == pytest.approx(1 - exp(-sample.quantile(probability)))
    assert fit_probability(sample, (1 - margin) * 80.0, 80.0) == pytest.approx(probability, abs=0.03)


def test_the_nearest_runs_are_of_different_models_or_devices():
    small, large = replace(TRAITS, params=1e9), replace(TRAITS, params=70e9)
    runs = [
        PublishedRun("small", "a", "1B", small, 0.1, float("nan")),
        PublishedRun("small-2", "a", "1B", small, 0.2, float("nan")),
        PublishedRun("large", "a", "70B", large, float("nan"), 0.1),
    ]
    near = nearest_runs(replace(TRAITS, params=60e9), runs)
    assert [run.id for run in near] == ["large", "small"]
    assert near[0].time_error is None
    assert near[0].memory_error == pytest.approx(exp(0.1) - 1)


def test_the_margin_of_a_run_file_decides_what_fits(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE + "seq_len = 4096\ntokens_per_step = 131072\n")
    auto = job_of_config(load_plan(str(file), []))
    assert auto.margin is None
    assert 0.03 < memory_margin(auto) < 0.2
    assert memory_margin(job_of_config(load_plan(str(file), ["plan.margin=0.3"]))) == 0.3
    generous, tight = (plan(replace(auto, margin=margin), {}).best for margin in (0.0, 0.6))
    assert tight.peak_memory <= 0.4 * auto.cluster.device.memory < generous.peak_memory


def test_a_plan_says_how_far_its_estimate_may_be_off():
    task = replace(job(host=HOST), margin=None)
    report = plan(task, {})
    assert report.uncertainty.time90.low <= report.best.step_seconds <= report.uncertainty.time90.high
    assert report.uncertainty.fits >= FIT_PROBABILITY
    assert report.uncertainty.margin == memory_margin(task)
    assert report.as_dict()["uncertainty"]["nearest"]
    assert search(task, {}).plans[0] == report.best


# The published runs


def test_the_stored_errors_are_read_as_they_were_written():
    runs = published_runs()
    assert len(runs) > 1000
    assert all(set(csv_row(run)) == set(csv_row(runs[0])) for run in runs)
    assert len(published_runs("memory")) == sum(not np.isnan(run.memory_error) for run in runs)


@pytest.mark.parametrize(("level", "least", "most"), [(0.8, 0.74, 0.86), (0.9, 0.85, 0.95)])
def test_intervals_contain_runs_of_experiments_that_were_left_out(level, least, most):
    """The mean coverage over experiments; `benchmarks/planner_intervals.py` prints each."""
    runs = [run for run in published_runs() if not np.isnan(run.time_error)]
    shares = []
    for name in {run.experiment for run in runs}:
        others = [run for run in runs if run.experiment != name]
        bounds = {
            regime: interval(sample_of(others, "time", regime), level)
            for regime in {run.traits.time_regime for run in runs}
        }
        shares.append(
            np.mean([exp(run.time_error) in bounds[run.traits.time_regime] for run in runs if run.experiment == name])
        )
    assert least <= np.mean(shares) <= most


@pytest.mark.parametrize("value", ["1.5", "-0.1", "true", '"none"'])
def test_a_margin_that_is_no_share_is_refused(tmp_path, value):
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE + "seq_len = 4096\ntokens_per_step = 131072\n")
    with pytest.raises(ConfigError, match=r"^plan\.margin: must be 'auto', or a share of at least 0 and below 1, got"):
        load_plan(str(file), [f"plan.margin={value}"])
