"""Constants are fitted to runs, within bounds, and without those of the experiment that is left out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_constants import OWN, constants_of, estimator
from planner_jobs import case_of
from planner_refit import Rows, errors_of_folds, evaluated, fit, refit
from planner_rows import run_of
from planner_scores import planner, predict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MATMUL, DISPATCH = "NVIDIA A100-SXM4-80GB: matmul bfloat16", "megatron-lm: dispatch"


def runs(factors):
    """Runs of two models on A100, whose times are those of the planner with constants multiplied by `factors`."""
    cases = []
    for number, (hidden, tp, micro_batch) in enumerate([(8192, 8, 4), (8192, 4, 2), (4096, 4, 1), (1024, 8, 1)] * 2):
        cells = {"id": f"new-{number}", "source": "megatron", "model_name": "llama", "layers": "24", "gpus": "8"}
        cells |= {"hidden": str(hidden), "heads": str(hidden // 128), "vocab": "32000", "seq_len": "2048", "pp": "1"}
        cells |= {"gpu": "A100-80GB", "tp": str(tp), "micro_batch": str(micro_batch), "global_batch": "64"}
        cases.append(case_of(run_of(cells | {"step_time_s": "1", "precision": "bf16"})))
    seconds = predict(cases, estimator(factors)).seconds
    return [replace(case, seconds=float(time)) for case, time in zip(cases, seconds, strict=True)]


def halves(count):
    return ["one" if index < count / 2 else "two" for index in range(count)]


def test_without_factors_times_are_the_planner_s():
    cases = runs({})
    assert predict(cases, estimator({})).seconds == pytest.approx(predict(cases, planner).seconds)


def test_every_constant_changes_a_time_and_is_put_back():
    case = runs({})[0]
    before = [getattr(module, name) for module, name, _ in OWN]
    names = {item.name for item in constants_of(case.job) if item.scaled is not None}
    assert {MATMUL, DISPATCH} <= names
    slow = predict([case], estimator({MATMUL: 0.8})).seconds
    assert slow > 1.1 * case.seconds
    assert predict([case], estimator({"planner: pass_seconds": 5.0})).seconds > case.seconds
    assert [getattr(module, name) for module, name, _ in OWN] == before


def test_constants_are_those_that_the_times_were_made_with():
    cases = runs({MATMUL: 0.9})
    factors = fit(evaluated(cases, halves(len(cases))))
    assert factors[MATMUL] == pytest.approx(0.9, abs=0.03)
    errors = np.abs(predict(cases, estimator(factors)).seconds / [case.seconds for case in cases] - 1)
    assert errors.max() < 0.04 < np.abs(predict(cases, estimator({})).seconds / [c.seconds for c in cases] - 1).max()


def test_a_constant_stays_within_its_bounds_and_one_without_influence_where_it_is():
    cases = runs({MATMUL: 0.9})
    rows = evaluated([replace(case, seconds=case.seconds / 50) for case in cases], halves(len(cases)))
    (matmul,) = (item for item in rows.constants if item.name == MATMUL)
    factors = fit(rows)
    assert factors[MATMUL] == pytest.approx(matmul.upper / matmul.value)
    assert "planner: exchange_passes" not in factors


def test_a_fold_does_not_see_the_experiment_that_it_leaves_out():
    cases = runs({MATMUL: 0.9})
    rows = evaluated(cases, halves(len(cases)))
    shifted = np.where([name == "one" for name in rows.experiments], rows.errors + 0.5, rows.errors)
    other = Rows(rows.cases, rows.experiments, rows.constants, shifted, rows.derivatives)
    of_one, of_two = (
        {fold["experiment"]: fold["factors"] for fold in refit(these)["folds"]} for these in (rows, other)
    )
    assert of_one["one"] == of_two["one"]
    assert of_one["two"] != of_two["two"]


def test_one_wild_run_moves_a_robust_fit_little():
    cases = runs({MATMUL: 0.9})
    wild = [replace(case, seconds=case.seconds * (20 if index == 5 else 1)) for index, case in enumerate(cases)]
    calm, stirred = (fit(evaluated(some, halves(len(some))))[MATMUL] for some in (cases, wild))
    assert stirred == pytest.approx(calm, rel=0.25)


def test_the_committed_refit_is_of_these_constants():
    committed = json.loads((RESULTS / "planner_refit.json").read_text(encoding="utf-8"))
    values = {constant.name: constant.value for _, _, constant in OWN}
    shipped = {item["name"]: item["shipped"] for item in committed["constants"]}
    assert {name: value for name, value in shipped.items() if name in values} == {
        name: value for name, value in values.items() if name in shipped
    }
    page = (RESULTS.parents[1] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert errors_of_folds(committed) in page
    accuracy = json.loads((RESULTS / "planner_accuracy.json").read_text(encoding="utf-8"))
    errors = {item["experiment"]: item["time_mean_abs_error"] for item in accuracy["experiments"]}
    assert {fold["experiment"]: fold["shipped_mean_abs_error"] for fold in committed["folds"]} == pytest.approx(errors)
    means = [fold["refit_mean_abs_error"] for fold in committed["folds"]]
    assert committed["refit_mean_abs_error"] == pytest.approx(float(np.mean(means)))
