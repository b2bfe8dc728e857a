"""Errors of the planner on published runs, and their quantiles.

`published_errors.csv` has one row for each run: its experiment, the traits that it is compared by, and the logarithms
of measured / estimated step time and peak memory. `benchmarks/planner_intervals.py` writes it.

Runs of one experiment share a model, a cluster and a trainer, so that their errors are alike. Experiments with
`_FULL_WEIGHT` runs or more therefore weigh the same, however many they have; experiments with fewer weigh less.

A regime is a group of runs whose errors are alike, such as those of dense models (see `RunTraits`).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import log
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats
from kumi.plan.uncertainty.traits import RunTraits
from kumi.spec.cluster import MachineRuns

FILE = "published_errors.csv"
# An experiment with this many runs in a regime has its full weight there.
_FULL_WEIGHT = 20
# A regime needs this many experiments, so that no single one decides its quantiles.
_LEAST_EXPERIMENTS = 3
# Draws of runs of each experiment for the errors after a refit.
_DRAWS = 200


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
        """Return the regime of the error of `quantity`."""
        return self.traits.time_regime if quantity == "time" else self.traits.memory_regime


class ErrorSample(NamedTuple):
    """The errors (rows,) that stand for a planned run, with weights that add up to 1.

    `experiments`: the number of experiments. `regime`: the regime, or "" for the errors of all regimes. `names`: the
    experiment of every published run.
    """

    errors: Floats
    weights: Floats
    experiments: int
    regime: str
    names: tuple[str, ...]

    @property
    def spread(self) -> float:
        """The distance of the 10 % and the 90 % quantile."""
        return self.quantile(0.9) - self.quantile(0.1)

    def shifted(self, error: float) -> ErrorSample:
        """Return the sample with `error` added to every error."""
        return self._replace(errors=self.errors + error)

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
    names = tuple(run.experiment for run in chosen)
    return ErrorSample(errors, weights / weights.sum(), len(counts), regime if enough else "", names)


def calibrated_sample(runs: Sequence[PublishedRun], quantity: str, regime: str, count: int) -> ErrorSample:
    """Return the errors that remain on machines whose figures were refitted to `count` runs there.

    They are the errors of the runs of an experiment less the mean error of `count` other runs of it, drawn with a fixed
    seed: a refit removes what an experiment's errors have in common.
    """
    raw = sample_of(runs, quantity, regime)
    errors, weights = [], []
    generator = np.random.default_rng(0)
    for name in dict.fromkeys(raw.names):
        members = np.flatnonzero(np.array(raw.names) == name)
        if len(members) <= count:
            continue
        draws = members[generator.random((_DRAWS, len(members))).argsort(axis=1)[:, : count + 1]]
        errors.append(raw.errors[draws[:, 0]] - raw.errors[draws[:, 1:]].mean(axis=1))
        weights.append(np.full(_DRAWS, raw.weights[members].sum() / _DRAWS))
    if not errors:
        return raw
    shares = np.concatenate(weights)
    return raw._replace(errors=np.concatenate(errors), weights=shares / shares.sum())


@lru_cache(maxsize=16)
def machine_errors(quantity: str, regime: str, measured: MachineRuns | None) -> ErrorSample:
    """Return the errors of `quantity` in `regime`: published ones, or those that remain after a refit to `measured`.

    Where experiments differ less from each other than the runs of one experiment do, a refit to few runs removes
    nothing. The errors with the smaller spread are returned, shifted by the mean error that the refit left.
    """
    runs = published_runs(quantity)
    published = sample_of(runs, quantity, regime)
    if measured is None:
        return published
    remaining = calibrated_sample(runs, quantity, regime, measured.runs)
    ratio = measured.time_ratio if quantity == "time" else measured.memory_ratio
    narrower = remaining if remaining.spread < published.spread else published
    return narrower.shifted(log(ratio))


@lru_cache(maxsize=4)
def published_runs(quantity: str = "") -> tuple[PublishedRun, ...]:
    """Return the published runs with the planner's errors on them; only those with an error of `quantity`, if given."""
    text = files("kumi.plan.uncertainty").joinpath(FILE).read_text(encoding="utf-8")
    header, *rows = csv.reader(text.splitlines())
    column = header.index(f"{quantity}_error") if quantity else 0
    return tuple(_published_run(dict(zip(header, row, strict=True))) for row in rows if row[column])


def _published_run(row: dict[str, str]) -> PublishedRun:
    """Return the run of a row of the file, the inverse of `csv_row`."""
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
