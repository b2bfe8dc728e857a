"""Write the planner's errors on published runs into the package, and check the intervals that follow from them.

    python benchmarks/planner_intervals.py RUNS.csv [MORE.csv ...] --failures FAILURES.csv [--write] [--json OUT]

Every experiment is left out once: intervals and margins then come from the others (split-conformal prediction; Vovk et
al., 2005; one calibration set for each regime, every experiment with the same weight). Printed: coverage and width of
the intervals by experiment, beside those around one constant's times; the calibration of P(fits), its Brier score
beside that of the rule without a margin, and the shares of failed and finished runs that the default margin tells
apart. --write stores the errors of at most 200 runs of each experiment in src/kumi/plan/uncertainty.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path

import numpy as np
from planner_accuracy import cases
from planner_defaults import reading_of
from planner_experiments import experiments_of
from planner_jobs import Case
from planner_scores import Scored, complete, is_hard, known_to_fit, noticed, predict, predicted_memory

from kumi.plan.estimate import estimate_many
from kumi.plan.layout_batch import Bools, Floats, batch_layouts
from kumi.plan.time.step_time import step_times
from kumi.plan.uncertainty import error_table
from kumi.plan.uncertainty.error_table import PublishedRun, csv_row, sample_of
from kumi.plan.uncertainty.intervals import fit_probability, interval
from kumi.plan.uncertainty.margin import FIT_PROBABILITY, margin_for
from kumi.plan.uncertainty.traits import RunTraits, run_traits

TABLE = Path(__file__).parents[1] / "src" / "kumi" / "plan" / "uncertainty" / error_table.FILE
MOST_ROWS = 200
LEVELS = (0.8, 0.9)


@dataclass(frozen=True)
class Memory:
    """Layouts that are known to have fitted (`ran`) or to have run out of memory, (rows,) each.

    `estimate`, `capacity`: estimated bytes of the fullest rank, and bytes of its device.
    """

    traits: tuple[RunTraits, ...]
    experiments: tuple[str, ...]
    estimate: Floats
    capacity: Floats
    ran: Bools


def published(paths: Sequence[Path], failures: Path) -> tuple[list[PublishedRun], Scored, Memory]:
    """Return the runs of `paths` with their errors and their estimates, and which layouts are known to have fitted."""
    ran = predict(complete([case for path in paths for case in cases(path, measured=True)[0]])[0])
    lost = predict([case for case in cases(failures, measured=False)[0] if is_hard(case)])
    every = (*ran.cases, *lost.cases)
    names = experiments_of([case.run for case in every])
    traits = [traits_of(case) for case in every]
    memory = Memory(
        tuple(traits),
        tuple(names[case.run.id] for case in every),
        np.concatenate([known_to_fit(ran).memory, lost.memory]),
        np.array([case.job.cluster.device.memory for case in every], float),
        np.arange(len(every)) < len(ran),
    )
    sizes = predicted_memory(ran)
    runs = [
        PublishedRun(case.run.id, names[case.run.id], case.run.model, trait, *errors(case, seconds, size))
        for case, trait, seconds, size in zip(ran.cases, traits, ran.seconds, sizes)
    ]
    return runs, ran, memory


def errors(case: Case, seconds: float, size: float) -> tuple[float, float]:
    """Return log(measured / estimated) of a run's step time and memory; nan where it is not measured."""
    timed = case.seconds is not None and noticed(case)
    stated = case.run.memory is not None and bool(reading_of(case.run).tool)
    return (log(case.seconds / seconds) if timed else np.nan, log(case.run.memory / size) if stated else np.nan)


def traits_of(case: Case) -> RunTraits:
    x = batch_layouts([case.layout])
    if case.layout.stage_layers:
        ranks = np.arange(case.layout.pp)[:, None]
        kinds = step_times(case.job, x, ranks, np.ones(ranks.shape), case.layout.stage_layers).kinds
    else:
        kinds = estimate_many(case.job, x).kinds
    return run_traits(case.job, case.layout, {kind: float(seconds[0]) for kind, seconds in kinds.items()})


def coverage(runs: Sequence[PublishedRun], quantity: str, level: float) -> dict[str, tuple[int, float, float]]:
    """Return, for every experiment, its runs, the share of them inside the intervals that the other experiments give,
    and the median width of these: log(high / low)."""
    result = {}
    for name in sorted({run.experiment for run in runs if not np.isnan(run.error(quantity))}):
        others = [run for run in runs if run.experiment != name]
        left = [run for run in runs if run.experiment == name and not np.isnan(run.error(quantity))]
        bounds = {
            regime: interval(sample_of(others, quantity, regime), level)
            for regime in {run.regime(quantity) for run in left}
        }
        inside = [exp(run.error(quantity)) in bounds[run.regime(quantity)] for run in left]
        widths = [log(bounds[run.regime(quantity)].high / bounds[run.regime(quantity)].low) for run in left]
        result[name] = len(left), float(np.mean(inside)), float(np.median(widths))
    return result


def constant_runs(runs: Sequence[PublishedRun], ran: Scored) -> list[PublishedRun]:
    """Return `runs` with the errors of one constant, which the other experiments give (`Scored.with_others`)."""
    seconds = ran.with_others({run.id: run.experiment for run in runs}).others
    return [
        run if np.isnan(run.time_error) else replace(run, time_error=log(case.seconds / constant))
        for run, case, constant in zip(runs, ran.cases, seconds[0])
    ]


def fit_scores(runs: Sequence[PublishedRun], memory: Memory) -> dict[str, float]:
    """Return how well P(fits) and the default margin tell runs that fitted from failures, each experiment left out."""
    fits, capacity = np.empty(len(memory.traits)), np.empty(len(memory.traits))
    for name in set(memory.experiments):
        others = [run for run in runs if run.experiment != name]
        samples = {regime: sample_of(others, "memory", regime) for regime in {t.memory_regime for t in memory.traits}}
        for i in (i for i, experiment in enumerate(memory.experiments) if experiment == name):
            sample = samples[memory.traits[i].memory_regime]
            fits[i] = fit_probability(sample, memory.estimate[i], memory.capacity[i])
            capacity[i] = (1 - margin_for(sample, FIT_PROBABILITY)) * memory.capacity[i]
    planned, rule = memory.estimate <= capacity, memory.estimate <= memory.capacity
    return {
        "ran": int(memory.ran.sum()),
        "ran_said_not_to_fit": float(np.mean(~planned[memory.ran])),
        "oom": int((~memory.ran).sum()),
        "oom_recall": float(np.mean(~planned[~memory.ran])),
        "brier": _brier(fits, memory),
        "brier_without_margin": _brier(rule.astype(float), memory),
    }


def _brier(fits: Floats, memory: Memory) -> float:
    """Return the Brier score, failures and runs that fitted weighing the same."""
    squares = (fits - memory.ran) ** 2
    return float((squares[memory.ran].mean() + squares[~memory.ran].mean()) / 2)


def stored(runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """Return at most `MOST_ROWS` runs of every experiment, drawn with a fixed seed; those with a memory first."""
    chosen = []
    for name in sorted({run.experiment for run in runs}):
        members = [
            run
            for run in runs
            if run.experiment == name and not (np.isnan(run.time_error) and np.isnan(run.memory_error))
        ]
        random.Random(0).shuffle(members)
        chosen += sorted(members[:MOST_ROWS], key=lambda run: run.id)
    return chosen


def write(runs: Sequence[PublishedRun]) -> None:
    rows = [csv_row(run) for run in runs]
    with TABLE.open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, rows[0], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="measured runs")
    parser.add_argument("--failures", type=Path, required=True, help="layouts that ran out of memory")
    parser.add_argument("--write", action="store_true", help="store the errors in the package")
    parser.add_argument("--json", type=Path, help="write the scores")
    options = parser.parse_args(arguments)
    runs, ran, memory = published(options.runs, options.failures)
    table = stored(runs)
    if options.write:
        write(table)
    result: dict[str, object] = {}
    for label, some, quantity in (
        ("step time", table, "time"),
        ("one constant", constant_runs(runs, ran), "time"),
        ("memory", table, "memory"),
    ):
        for level in LEVELS:
            scores = coverage(some, quantity, level)
            mean = float(np.mean([share for _, share, _ in scores.values()]))
            width = float(np.median([wide for _, _, wide in scores.values()]))
            result[f"{label} {level:.0%}"] = {"coverage": mean, "width": width, "experiments": scores}
            print(f"{label}, {level:.0%}: coverage {mean:.1%}, mean of {len(scores)} experiments; width {width:.3f}")
            print("   " + ", ".join(f"{name} {share:.0%} of {n}" for name, (n, share, _) in scores.items()))
    result["fits"] = fit_scores(table, memory)
    print(", ".join(f"{name} {value:.4g}" for name, value in result["fits"].items()))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
