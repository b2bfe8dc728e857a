"""Intervals of a plan's step time and memory, from the errors of published runs of the same regime.

The intervals are split-conformal (Vovk et al., 2005): a share of the published errors of a regime lies inside, with
every experiment weighing the same. `benchmarks/planner_intervals.py` measures how many runs of an experiment that was
left out they contain (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from kumi.plan.uncertainty.error_table import ErrorSample, PublishedRun, machine_errors, published_runs
from kumi.plan.uncertainty.extrapolation import extrapolation
from kumi.plan.uncertainty.traits import RunTraits
from kumi.spec.cluster import MachineRuns

# Outside of the published runs' range, an interval's bounds are this power of the bounds inside. This is a judgement:
# no published run can measure it.
EXTRAPOLATED_WIDTH = 1.5
# Standard deviation of the memory error around each published one, for P(fits): the step between two published errors
# of the smallest regime.
_SMOOTHING = 0.02
# The number of similar published runs that an estimate names.
_NEAREST = 3


@dataclass(frozen=True)
class Interval:
    """The bounds of a measured value, in the unit of the estimate."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def scaled(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.high * factor)


@dataclass(frozen=True)
class NearRun:
    """A published run similar to the plan; `time_error`, `memory_error`: measured / estimated - 1, if stated."""

    id: str
    model: str
    gpu: str
    gpus: int
    time_error: float | None
    memory_error: float | None


@dataclass(frozen=True)
class Uncertainty:
    """How far the estimate of a plan may be off.

    `time80`, `time90`: intervals of the seconds of a step that contain 80 and 90 % of measured times.
    `memory80`, `memory90`: the same for the bytes of the fullest rank.
    `fits`: the probability that the fullest rank fits into its device.
    `margin`: the share of device memory that the plan leaves free.
    `regime`: the kind of runs with similar errors of step times. `rows`, `experiments`: the number of such runs, and of
    the experiments that they belong to.
    `machine_runs`: the number of runs on these machines that their figures were refitted to. `machine_error`: measured
    / estimated - 1 of their step times after the refit, the geometric mean.
    `extrapolated`: why the published runs do not cover the plan, so that its intervals are wider; "" if they do.
    `nearest`: the most similar published runs.
    """

    time80: Interval
    time90: Interval
    memory80: Interval
    memory90: Interval
    fits: float
    margin: float
    regime: str
    rows: int
    experiments: int
    machine_runs: int
    machine_error: float
    extrapolated: str
    nearest: tuple[NearRun, ...]


def uncertainty(
    traits: RunTraits,
    seconds: float,
    memory: float,
    capacity: float,
    margin: float,
    measured: MachineRuns | None = None,
) -> Uncertainty:
    """Return the uncertainty of a plan with `traits` and the estimates `seconds` of a step and `memory` in bytes.

    `capacity`: bytes of the device. `margin`: the share of it that the plan leaves free. `measured`: the runs that the
    figures of the plan's machines were refitted to.
    """
    runs = published_runs()
    time, size = (
        machine_errors(quantity, regime, measured)
        for quantity, regime in (("time", traits.time_regime), ("memory", traits.memory_regime))
    )
    reason = extrapolation(traits, runs, on_measured_machines=measured is not None)
    width = EXTRAPOLATED_WIDTH if reason else 1.0
    remaining = 0.0 if measured is None else log(measured.time_ratio)
    return Uncertainty(
        time80=interval(time, 0.8, width, remaining).scaled(seconds),
        time90=interval(time, 0.9, width, remaining).scaled(seconds),
        memory80=interval(size, 0.8, width).scaled(memory),
        memory90=interval(size, 0.9, width).scaled(memory),
        fits=fit_probability(size, memory, capacity, width),
        margin=margin,
        regime=time.regime,
        rows=len(time.names),
        experiments=time.experiments,
        machine_runs=0 if measured is None else measured.runs,
        machine_error=exp(remaining) - 1,
        extrapolated=reason,
        nearest=nearest_runs(traits, runs),
    )


def interval(sample: ErrorSample, level: float, width: float = 1.0, remaining: float = 0.0) -> Interval:
    """Return bounds of measured / estimated: those that contain the share `level` of `sample`, to the power `width`.

    The interval always contains 1, the estimate itself. `remaining`: the part of every error that a refit left in its
    runs, because a constant stopped at a bound. Nothing shows whether it recurs in another run, so the interval covers
    the errors with and without it.
    """
    low, high = sample.quantile((1 - level) / 2), sample.quantile((1 + level) / 2)
    low, high = low - max(0.0, remaining), high - min(0.0, remaining)
    return Interval(exp(width * min(0.0, low)), exp(width * max(0.0, high)))


def fit_probability(sample: ErrorSample, memory: float, capacity: float, width: float = 1.0) -> float:
    """Return the probability that a rank with the estimate `memory` needs at most `capacity` bytes.

    It is the share of `sample` with measured memory within `capacity`, each error smoothed by a logistic function.
    """
    if memory <= 0:
        return 1.0
    room = log(capacity / memory)
    shares = 1 / (1 + np.exp(np.clip((width * sample.errors - room) / _SMOOTHING, -50.0, 50.0)))
    return float((shares * sample.weights).sum())


def nearest_runs(traits: RunTraits, runs: Sequence[PublishedRun], count: int = _NEAREST) -> tuple[NearRun, ...]:
    """Return the `count` most similar of `runs`, the most similar first; at most one of each model and device."""
    ordered = sorted(runs, key=lambda run: _distance(traits, run.traits))
    first: dict[tuple[str, str], PublishedRun] = {}
    for run in ordered:
        first.setdefault((run.model, run.traits.device), run)
        if len(first) == count:
            break
    return tuple(
        NearRun(run.id, run.model, run.traits.device, run.traits.devices, *map(_relative, _errors(run)))
        for run in first.values()
    )


def _errors(run: PublishedRun) -> tuple[float, float]:
    return run.time_error, run.memory_error


def _relative(error: float) -> float | None:
    return None if np.isnan(error) else exp(error) - 1


def _distance(planned: RunTraits, published: RunTraits) -> float:
    """Return how different two runs are: factors of size as powers of two, and points for traits that differ."""
    ratios = (
        1.0 * abs(log(planned.params / published.params, 2)),
        0.7 * abs(log(planned.devices / published.devices, 2)),
        0.5 * abs(log(planned.seq_len / published.seq_len, 2)),
    )
    differ = [getattr(planned, name) != getattr(published, name) for name in ("device", "stack", "experts")]
    other_recompute = planned.recompute != published.recompute
    communication = abs(planned.communication - published.communication)
    return float(sum(ratios) + 2.0 * sum(differ) + 1.0 * other_recompute + 5.0 * communication)
