"""Calibration of the constants in a cluster's description to the measured steps of runs on it.

    calibrate(runs) -> Calibration: the constants that moved, with both values, and those that no run determines

A constant has a value, bounds, and a function that scales it in a cluster. A run gives one equation, its step time, so
n runs determine at most n constants: those with the largest and most independent influence on the steps. The others
keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from kumi.errors import ConfigError
from kumi.plan.calibration.fit_constants import identifiable_columns, least_squares, log_jacobian
from kumi.plan.estimate import estimate
from kumi.plan.estimates import Estimate, bytes_as_measured
from kumi.plan.layout_batch import Floats, Ints
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.job import Job
from kumi.spec.layout import Layout

_Estimator = Callable[[Job, Layout], Estimate]

# The constant for device memory that no tensor accounts for. It grows by the largest excess of the memory that a run
# measured over the memory that was estimated for the run.
_RESERVED = "device.reserved"

# A constant moves only if it has this influence on a step: the relative change of the step's time when the constant
# grows by a factor of e, after removing the part that better determined constants explain.
_LEAST_INFLUENCE = 0.05
# A constant moves by at most this factor. A fit with a larger factor would hide another error.
MAX_FACTOR = 5.0
# A constant whose logarithm is this close to that of a bound has stopped there.
_AT_BOUND = 1e-6


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run.

    `job`, `layout`: the training job; `job.cluster` has the constants before calibration.
    `seconds`: the median time of its `steps` measured steps.
    `peak_memory`: the largest number of bytes in tensors on a rank.
    `device`: the name of the devices that it used, which may differ from that in `job.cluster`.
    """

    name: str
    job: Job
    layout: Layout
    seconds: float
    steps: int
    peak_memory: int
    device: str


@dataclass(frozen=True)
class ClusterConstant:
    """A constant of a cluster with its bounds. `scaled` returns a cluster with the constant multiplied by a factor."""

    name: str
    value: float
    lower: float
    upper: float
    scaled: Callable[[ClusterSpec, float], ClusterSpec]


@dataclass(frozen=True)
class RunComparison:
    """A run's measurements and estimates.

    `measured`, `before`, `after`: seconds of a step, measured and estimated before and after calibration.
    `measured_memory`, `estimated_memory`: peak bytes on a rank, without the reserved memory of the device.
    """

    name: str
    steps: int
    measured: float
    before: float
    after: float
    measured_memory: int
    estimated_memory: int


@dataclass(frozen=True)
class Calibration:
    """Constants refitted to runs.

    `moved`: constants with their values before and after.
    `kept`: the other constants, each with the reason.
    `bounded`: the constants of `moved` that stopped at a bound.
    """

    moved: Mapping[str, tuple[float, float]]
    kept: Mapping[str, str]
    runs: tuple[RunComparison, ...]
    bounded: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The origin of the new constants, for the cluster file."""
        return f"calibrated on {', '.join(f'{run.name}: {run.steps} steps' for run in self.runs)}"

    @property
    def time_ratio(self) -> float:
        """The geometric mean of measured / estimated step times after the refit."""
        return exp(sum(log(run.measured / run.after) for run in self.runs) / len(self.runs))


def calibrate(runs: Sequence[MeasuredRun], estimator: _Estimator = estimate) -> Calibration:
    """Fit the constants to the measured steps of `runs`, which were on one cluster.

    `estimator`: returns the estimate of a layout of a job.

    Raise ConfigError without runs, or if no constant has an influence on any of them.
    """
    if not runs:
        raise ConfigError("calibrate: no run was given; name the folder of at least one finished run")
    constants = list(cluster_constants(runs))
    start = np.ones(len(constants))

    def residuals(factors: Floats) -> Floats:
        errors: Floats = np.log([_seconds(run, constants, factors, estimator) / run.seconds for run in runs])
        return errors

    chosen = identifiable_columns(log_jacobian(residuals, start), _LEAST_INFLUENCE)
    if not len(chosen):
        raise ConfigError(
            f"calibrate: the steps of {', '.join(run.name for run in runs)} hardly depend on any constant of "
            f"the cluster; add a run with more work per step"
        )
    lower, upper = zip(*(_factor_bounds(constants[index]) for index in chosen), strict=True)

    def chosen_residuals(factors: Floats) -> Floats:
        return residuals(_all_factors(chosen, factors, len(constants)))

    fitted = least_squares(chosen_residuals, start[chosen], lower, upper)
    factors = _all_factors(chosen, fitted, len(constants))
    moved = {
        constants[index].name: (constants[index].value, float(constants[index].value * factors[index]))
        for index in sorted(chosen)
    }
    unchanged = {
        constant.name: _too_little_influence(len(runs))
        for index, constant in enumerate(constants)
        if index not in chosen
    }
    comparisons = tuple(_compare(run, constants, factors, estimator) for run in runs)
    excess = max(item.measured_memory - item.estimated_memory for item in comparisons)
    reserved = runs[0].job.cluster.device.reserved
    if excess > 0:
        moved[_RESERVED] = (float(reserved), float(reserved + excess))
    else:
        unchanged[_RESERVED] = "no run needed more memory than estimated"
    stopped = np.isclose(np.log(fitted), np.log(lower), atol=_AT_BOUND, rtol=0)
    stopped |= np.isclose(np.log(fitted), np.log(upper), atol=_AT_BOUND, rtol=0)
    bounded = tuple(constants[index].name for index in sorted(chosen[stopped]))
    return Calibration(moved, unchanged, comparisons, bounded)


def _too_little_influence(count: int) -> str:
    """Return the reason why a constant keeps its value: the steps of `count` runs hardly depend on it."""
    return (
        f"the steps of {count} {'run depend' if count == 1 else 'runs depend'} too little on it; add runs with other "
        f"layouts, batches or models"
    )


def cluster_constants(runs: Sequence[MeasuredRun]) -> Iterator[ClusterConstant]:
    """Yield the constants of the clusters of `runs`, with the matmul efficiency of each dtype that `runs` use.

    The constants of the device are those of the first run.
    """
    device = runs[0].job.cluster.device
    for dtype in dict.fromkeys(run.job.precision.compute for run in runs):
        yield ClusterConstant(f"device.matmul.{dtype}", device.matmul_share(dtype), 0.01, 1.0, _scale_matmul(dtype))
    for name, lower, upper in (("stream", 0.01, 1.0), ("launch", 1e-8, 1e-2)):
        value = float(getattr(device, name))
        if value > 0:
            yield ClusterConstant(f"device.{name}", value, lower, upper, _scale_device(name))
    links = {link.name: link for run in runs for link in run.job.cluster.links}
    for link in links.values():
        scale_bandwidth, scale_latency = (_scale_link(link.name, field) for field in ("bandwidth", "latency"))
        yield ClusterConstant(f"{link.name}: bandwidth", link.bandwidth, 1e3, 1e15, scale_bandwidth)
        if link.latency > 0:
            yield ClusterConstant(f"{link.name}: latency", link.latency, 1e-9, 10.0, scale_latency)


def _scale_matmul(dtype: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    """Return the function that multiplies the device's matmul efficiency in `dtype` by a factor."""

    def scaled(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        device = cluster.device
        shares = dict(device.matmul) | {dtype: device.matmul_share(dtype) * factor}
        return replace(cluster, device=replace(device, matmul=tuple(shares.items())))

    return scaled


def _scale_device(field: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    """Return the function that multiplies `field` of the device by a factor."""

    def scaled(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        device: Device = replace(cluster.device, **{field: getattr(cluster.device, field) * factor})
        return replace(cluster, device=device)

    return scaled


def _scale_link(name: str, field: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    """Return the function that multiplies `field` of the link `name` by a factor."""

    def scaled_link(link: Link, factor: float) -> Link:
        return replace(link, **{field: getattr(link, field) * factor}) if link.name == name else link

    def scaled(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        return replace(cluster, links=tuple(scaled_link(link, factor) for link in cluster.links))

    return scaled


def _factor_bounds(constant: ClusterConstant) -> tuple[float, float]:
    """Return the smallest and the largest factor by which `constant` may move."""
    lower = max(constant.lower / constant.value, 1 / MAX_FACTOR)
    return min(lower, 1.0), max(min(constant.upper / constant.value, MAX_FACTOR), 1.0)


def _all_factors(chosen: Ints, factors: Floats, count: int) -> Floats:
    """Return the factors of all `count` constants: `factors` for those with the indices `chosen`, 1 for the others."""
    result = np.ones(count)
    result[chosen] = factors
    return result


def _scaled_job(run: MeasuredRun, constants: Sequence[ClusterConstant], factors: Floats) -> Job:
    """Return the job of `run` with each of `constants` multiplied by its factor."""
    cluster = run.job.cluster
    for constant, factor in zip(constants, factors, strict=True):
        cluster = cluster if factor == 1.0 else constant.scaled(cluster, float(factor))
    return replace(run.job, cluster=cluster)


def _seconds(run: MeasuredRun, constants: Sequence[ClusterConstant], factors: Floats, estimator: _Estimator) -> float:
    return estimator(_scaled_job(run, constants, factors), run.layout).step_seconds


def _compare(
    run: MeasuredRun, constants: Sequence[ClusterConstant], factors: Floats, estimator: _Estimator
) -> RunComparison:
    """Return the measurements of `run` beside its estimates before and after the constants are scaled by `factors`."""
    before = estimator(_scaled_job(run, constants, np.ones(len(constants))), run.layout)
    after = estimator(_scaled_job(run, constants, factors), run.layout)
    memory = max(bytes_as_measured(stage, run.job.cluster.device) for stage in before.memory)
    return RunComparison(
        run.name, run.steps, run.seconds, before.step_seconds, after.step_seconds, run.peak_memory, memory
    )
