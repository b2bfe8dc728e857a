"""Errors of the planner on published runs, and their quantiles.

`published_errors.csv` has one row for each run: its experiment, the traits that it is compared by, and the logarithms
of measured / estimated step time and peak memory. `benchmarks/planner_intervals.py` writes it.

Runs of one experiment share a model, a cluster and a trainer, so that their errors are alike. Every experiment
therefore weighs the same, however many runs it has; experiments with fewer than `_FULL_WEIGHT` runs weigh less.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np

from kumi.plan.layout_batch import Floats
from kumi.plan.uncertainty.traits import RunTraits

FILE = "published_errors.csv"
# An experiment with this many runs in a regime has its full weight there.
_FULL_WEIGHT = 20
# A regime needs this many experiments, so that no single one decides its quantiles.
_LEAST_EXPERIMENTS = 3


@dataclass(frozen=True)
class PublishedRun:
    """A published run with the errors of its estimate.

    `time_error`, `memory_error`: log(measured / estimated); nan if the source does not state the figure.
    """

    id: str
    experiment: str
    model: str
    traits: RunTraits
    time_error: float
    memory_error: float

    def error(self, quantity: str) -> float:
        """Return the error of `quantity`: "time" or "memory"."""
        return self.time_error if quantity == "time" else self.memory_error

    def regime(self, quantity: str) -> str:
        return self.traits.time_regime if quantity == "time" else self.traits.memory_regime


@dataclass(frozen=True)
class ErrorSample:
    """The errors (rows,) that stand for a planned run, with weights that add up to 1.

    `experiments`: the number of experiments. `regime`: the regime, or "" for the errors of all regimes.
    """

    errors: Floats
    weights: Floats
    experiments: int
    regime: str

    def quantile(self, share: float) -> float:
        """Return the smallest error that at least `share` of the weight does not exceed."""
        order = np.argsort(self.errors)
        below = np.cumsum(self.weights[order])
        return float(self.errors[order][min(len(order) - 1, int(np.searchsorted(below, share - 1e-9)))])


def sample_of(runs: Sequence[PublishedRun], quantity: str, regime: str) -> ErrorSample:
    """Return the errors of the `runs` of `regime`, or of all runs where the regime has too few experiments."""
    stated = [run for run in runs if not np.isnan(run.error(quantity))]
    similar = [run for run in stated if run.regime(quantity) == regime]
    enough = len({run.experiment for run in similar}) >= _LEAST_EXPERIMENTS
    chosen = similar if enough else stated
    counts: dict[str, int] = {}
    for run in chosen:
        counts[run.experiment] = counts.get(run.experiment, 0) + 1
    weights = np.array([min(1.0, counts[run.experiment] / _FULL_WEIGHT) / counts[run.experiment] for run in chosen])
    errors = np.array([run.error(quantity) for run in chosen])
    return ErrorSample(errors, weights / weights.sum(), len(counts), regime if enough else "")


@lru_cache(maxsize=2)
def published_runs(quantity: str = "") -> tuple[PublishedRun, ...]:
    """Return the published runs with the planner's errors on them; only those with an error of `quantity`, if given."""
    text = files("kumi.plan.uncertainty").joinpath(FILE).read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    stated = header.index(f"{quantity}_error") if quantity else 0
    return tuple(_published_run(dict(zip(header, row, strict=True))) for row in rows if row[stated])


def _published_run(row: dict[str, str]) -> PublishedRun:
    traits = RunTraits(
        stack=row["stack"],
        experts=row["experts"] == "yes",
        recompute=row["recompute"],
        device=row["device"],
        devices=int(row["devices"]),
        params=float(row["params"]),
        seq_len=int(row["seq_len"]),
        communication=float(row["communication"]),
        techniques=tuple(row["techniques"].split("+")) if row["techniques"] else (),
    )
    time_error, memory_error = (float(row[name] or "nan") for name in ("time_error", "memory_error"))
    return PublishedRun(row["id"], row["experiment"], row["model"], traits, time_error, memory_error)


def csv_row(run: PublishedRun) -> dict[str, str]:
    """Return the row of the file for `run`."""
    traits = run.traits
    return {
        "id": run.id,
        "experiment": run.experiment,
        "model": run.model,
        "stack": traits.stack,
        "experts": "yes" if traits.experts else "no",
        "recompute": traits.recompute,
        "device": traits.device,
        "devices": str(traits.devices),
        "params": f"{traits.params:.4g}",
        "seq_len": str(traits.seq_len),
        "communication": f"{traits.communication:.3f}",
        "techniques": "+".join(traits.techniques),
        "time_error": "" if np.isnan(run.time_error) else f"{run.time_error:.4f}",
        "memory_error": "" if np.isnan(run.memory_error) else f"{run.memory_error:.4f}",
    }
