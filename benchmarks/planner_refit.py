"""Fit the planner's constants to published runs, and say how it does on experiments that the fit has not seen.

python benchmarks/planner_refit.py RUNS.csv [--json OUT]

Constants (`planner_constants`) are fitted by least squares on log(estimated / measured) of step times, within bounds,
every experiment counting once, errors beyond 20 % by their absolute value (Huber, 1964), and with a prior: a constant
is 30 % off what it is now, more or less. Those that the runs do not determine keep their value. A fold leaves one
experiment out; printed is its error with the constants as they are and with those of its fold. The former were set by
hand with some of these experiments in view, the latter have not seen it. Last come the constants fitted to all.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from planner_accuracy import cases
from planner_constants import Constant, constants_of, estimator
from planner_experiments import experiments_of
from planner_jobs import Case
from planner_scores import complete, noticed, predict

from kumi.plan.calibration.fit_constants import identifiable_columns, least_squares

Floats = NDArray[np.float64]

# Rows of an experiment that a fit uses, evenly spaced: they err alike, and a thousand say little more than a hundred.
MOST_ROWS = 120
# Errors of a logarithm beyond this count by their absolute value.
ROBUST = 0.2
# How far a constant is thought to be off, in logarithms.
PRIOR = 0.3
# A constant moves only where it has at least this influence on the mean experiment (`identifiable_columns`).
LEAST_INFLUENCE = 0.02
# Difference of a constant's logarithm for derivatives.
DIFFERENCE = 0.02


@dataclass(frozen=True)
class Rows:
    """Timed runs with their experiments, logs of estimated / measured, (rows,), and the derivatives of these with
    respect to the logarithms of `constants`, (rows, constants)."""

    cases: tuple[Case, ...]
    experiments: tuple[str, ...]
    constants: tuple[Constant, ...]
    errors: Floats
    derivatives: Floats

    def where(self, mask: Sequence[bool]) -> Rows:
        index = np.flatnonzero(mask)
        cases = tuple(self.cases[i] for i in index)
        experiments = tuple(self.experiments[i] for i in index)
        return Rows(cases, experiments, self.constants, self.errors[index], self.derivatives[index])


def rows_of(runs: Path) -> Rows:
    """The timed runs of a file, evaluated at the constants as they are."""
    ran = complete(cases(runs, measured=True)[0])[0]
    names = experiments_of([case.run for case in ran])
    timed = [case for case in ran if case.seconds is not None and noticed(case)]
    return evaluated(timed, [names[case.run.id] for case in timed])


def evaluated(timed: Sequence[Case], experiments: Sequence[str]) -> Rows:
    """Runs with their experiments, evaluated at the constants as they are."""
    constants = tuple({item.name: item for case in timed for item in constants_of(case.job)}.values())
    errors = log_errors(timed, {})
    derivatives = np.zeros((len(timed), len(constants)))
    column = {item.name: index for index, item in enumerate(constants)}
    # A run has one constant of each kind at most (":" and all that follows), so that one pass serves all of a kind.
    kinds: dict[str, list[str]] = {}
    for item in constants:
        kinds.setdefault(kind_of(item), []).append(item.name)
    for members in kinds.values():
        change = (log_errors(timed, dict.fromkeys(members, np.exp(DIFFERENCE))) - errors) / DIFFERENCE
        for row, case in enumerate(timed):
            for item in constants_of(case.job):
                if item.name in members:
                    derivatives[row, column[item.name]] = change[row]
    return Rows(tuple(timed), tuple(experiments), constants, errors, derivatives)


def kind_of(constant: Constant) -> str:
    """The word that constants of one kind share ("matmul", "stream", ...); a run has one constant of each kind."""
    owner, _, field = constant.name.rpartition(": ")
    return constant.name if owner == "planner" else field.split()[0]


def log_errors(timed: Sequence[Case], factors: Mapping[str, float]) -> Floats:
    measured = np.array([case.seconds for case in timed])
    errors: Floats = np.log(predict(timed, estimator(factors)).seconds / measured)
    return errors


def fit(rows: Rows) -> dict[str, float]:
    """Factors of the constants that `rows` determine, to first order about the constants as they are."""
    rows = thinned(rows)
    counts = {name: rows.experiments.count(name) for name in rows.experiments}
    weights = np.sqrt([1 / counts[name] for name in rows.experiments])
    chosen = identifiable_columns(weights[:, None] * rows.derivatives, LEAST_INFLUENCE)
    some = [rows.constants[index] for index in chosen]
    derivatives = rows.derivatives[:, chosen]

    def residuals(factors: Floats) -> Floats:
        logs = np.log(factors)
        errors = rows.errors + derivatives @ logs
        size = np.abs(errors)
        # Squared, it is Huber's loss.
        beyond = np.sqrt(2 * ROBUST * np.maximum(size, ROBUST) - ROBUST**2)
        robust = np.sign(errors) * np.where(size <= ROBUST, size, beyond)
        # The prior counts as one experiment whose error is that of a typical one, 10 %.
        return np.concatenate([weights * robust, 0.1 * logs / PRIOR])

    lower, upper = ([getattr(item, bound) / item.value for item in some] for bound in ("lower", "upper"))
    factors = least_squares(residuals, np.ones(len(some)), lower, upper)
    return {item.name: float(factor) for item, factor in zip(some, factors, strict=True)}


def thinned(rows: Rows) -> Rows:
    """At most `MOST_ROWS` of each experiment, evenly spaced."""
    index: list[int] = []
    for name in dict.fromkeys(rows.experiments):
        members = np.flatnonzero([item == name for item in rows.experiments])
        index += members[np.unique(np.linspace(0, len(members) - 1, MOST_ROWS).round().astype(int))].tolist()
    return rows.where(np.isin(np.arange(len(rows.cases)), index))


def refit(rows: Rows) -> dict:
    """The errors of every experiment as plain data (`folds`), their means, and the constants fitted to all."""
    folds = []
    for name in dict.fromkeys(rows.experiments):
        mine = np.array([item == name for item in rows.experiments])
        left_out, factors = rows.where(mine), fit(rows.where(~mine))
        elsewhere = {case.job.cluster.device.name for case in rows.where(~mine).cases}
        folds.append(
            {
                "experiment": name,
                "rows": len(left_out.cases),
                "rows_of_gpus_elsewhere": sum(c.job.cluster.device.name in elsewhere for c in left_out.cases),
                "moved": len(factors),
                "shipped_mean_abs_error": float(np.mean(np.abs(np.expm1(left_out.errors)))),
                "refit_mean_abs_error": error_of(left_out, factors),
                "factors": factors,
            }
        )
    of_all = fit(rows)
    means = {
        f"{which}_mean_abs_error": float(np.mean([fold[f"{which}_mean_abs_error"] for fold in folds]))
        for which in ("shipped", "refit")
    }
    constants = [
        {"name": item.name, "shipped": item.value, "refit": item.value * of_all.get(item.name, 1.0)}
        for item in rows.constants
        if item.name in of_all
    ]
    gains = np.array([fold["shipped_mean_abs_error"] - fold["refit_mean_abs_error"] for fold in folds])
    better = sum(fold["refit_mean_abs_error"] < fold["shipped_mean_abs_error"] for fold in folds)
    return {
        "folds": folds,
        **means,
        "experiments_better": better,
        "gain": float(np.mean(gains)),
        "gain_standard_error": float(np.std(gains, ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else None,
        "in_sample_mean_abs_error": float(
            np.mean(
                [error_of(rows.where([e == fold["experiment"] for e in rows.experiments]), of_all) for fold in folds]
            )
        ),
        "constants": constants,
        "unmoved": [item.name for item in rows.constants if item.name not in of_all],
    }


def error_of(rows: Rows, factors: Mapping[str, float]) -> float:
    """Mean |estimated / measured - 1| with the constants multiplied by `factors`."""
    return float(np.mean(np.abs(np.expm1(log_errors(rows.cases, factors)))))


def report(result: dict) -> str:
    """The errors of left-out experiments, then the constants fitted to all."""
    lines = [errors_of_folds(result)]
    lines += [f"{item['name']}: {item['shipped']:.4g} -> {item['refit']:.4g}" for item in result["constants"]]
    lines.append(f"not determined: {', '.join(result['unmoved']) or 'none'}")
    return "\n".join(lines)


def errors_of_folds(result: dict) -> str:
    lines = [f"{'left out':14}  {'rows':>5}  {'(GPU elsewhere)':>15}  {'shipped':>7}  {'refit':>6}"]
    lines += [
        f"{fold['experiment']:14}  {fold['rows']:5}  {fold['rows_of_gpus_elsewhere']:15}  "
        f"{fold['shipped_mean_abs_error']:7.1%}  {fold['refit_mean_abs_error']:6.1%}"
        for fold in result["folds"]
    ]
    lines.append(
        f"{len(result['folds'])} experiments, each counted once: shipped {result['shipped_mean_abs_error']:.1%}, refit "
        f"without them {result['refit_mean_abs_error']:.1%}, refit with them {result['in_sample_mean_abs_error']:.1%}; "
        f"the refit is better in {result['experiments_better']}"
    )
    if result["gain_standard_error"] is not None:
        lines.append(
            f"gain of the refit: {result['gain']:.1%}, with a standard error of {result['gain_standard_error']:.1%}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Fit the planner's constants to published runs.")
    parser.add_argument("runs", type=Path, help="measured runs, in the columns of tests/published/runs.csv")
    parser.add_argument("--json", type=Path, help="write errors and constants there, too")
    options = parser.parse_args(arguments)
    try:
        result = refit(rows_of(options.runs))
    except (OSError, ValueError) as error:
        print(f"planner_refit: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
