"""The few constants of a cluster's description, from the measured steps of runs on it.

    calibrate(runs) -> Calibration      which constants moved, from what to what, and which no run can tell

Every constant is a `Knob`: a value, its bounds, and how a factor on it changes a cluster. A run says one thing, how
long its step takes, so that n runs move n constants at most: those that the steps depend on most, and each other least.
The others stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kumi.errors import ConfigError
from kumi.plan.calibration.fit_constants import identifiable, least_squares, slopes
from kumi.plan.estimate import estimate
from kumi.plan.estimates import Estimate
from kumi.plan.layout_batch import Floats, Ints
from kumi.spec.cluster import ClusterSpec, Device, Link
from kumi.spec.job import Job
from kumi.spec.layout import Layout

Estimator = Callable[[Job, Layout], Estimate]

# What a rank holds beside what is estimated tensor by tensor: grows by what runs took beyond that.
RESERVED = "device.reserved"

# Relative change of a step's time, for a constant that grows by a factor of e and with what better determined ones
# explain taken away, below which the constant is not said to be known from that step.
LEAST_INFLUENCE = 0.05
# A constant moves by this factor at most: more says that something else is wrong.
MOST_MOVED = 5.0


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: what was trained on what, and the median of its `steps` measured steps in `seconds`.

    `job.cluster` is described as before calibration. `peak_memory` is the most that tensors took on a rank, in bytes.
    """

    name: str
    job: Job
    layout: Layout
    seconds: float
    steps: int
    peak_memory: int


@dataclass(frozen=True)
class Knob:
    """A constant: its name and value, the least and the most it can be, and the cluster on which it is that many times
    as large."""

    name: str
    value: float
    lower: float
    upper: float
    scaled: Callable[[ClusterSpec, float], ClusterSpec]


@dataclass(frozen=True)
class Compared:
    """A run's measured step in seconds beside the estimate before and after calibration; its peak of memory in bytes
    beside the estimate, each without what is held before any tensor."""

    name: str
    steps: int
    measured: float
    before: float
    after: float
    measured_memory: int
    estimated_memory: int


@dataclass(frozen=True)
class Calibration:
    """`moved`: constants with their values before and after. `kept`: those that stay, each with the reason."""

    moved: Mapping[str, tuple[float, float]]
    kept: Mapping[str, str]
    runs: tuple[Compared, ...]

    @property
    def source(self) -> str:
        """Where the moved constants come from, for the cluster file."""
        return f"calibrated on {', '.join(f'{run.name}: {run.steps} steps' for run in self.runs)}"


def calibrate(runs: Sequence[MeasuredRun], estimator: Estimator = estimate) -> Calibration:
    """The constants with which the estimated steps of `runs` come closest to the measured ones.

    Raises ConfigError where there is no run, or where no constant has an influence on any.
    """
    if not runs:
        raise ConfigError("calibrate: no run was given; name the folder of at least one finished run")
    every = list(knobs(runs))
    start = np.ones(len(every))

    def residuals(factors: Floats) -> Floats:
        found: Floats = np.log([_seconds(run, every, factors, estimator) / run.seconds for run in runs])
        return found

    chosen = identifiable(slopes(residuals, start), LEAST_INFLUENCE)
    if not len(chosen):
        raise ConfigError(
            f"calibrate: the steps of {', '.join(run.name for run in runs)} depend on no constant of the "
            f"cluster; give a run with more work in it"
        )
    lower, upper = zip(*(_factor_bounds(every[index]) for index in chosen), strict=True)

    def chosen_residuals(factors: Floats) -> Floats:
        return residuals(_spread(chosen, factors, len(every)))

    factors = _spread(chosen, least_squares(chosen_residuals, start[chosen], lower, upper), len(every))
    moved = {
        every[index].name: (every[index].value, float(every[index].value * factors[index])) for index in sorted(chosen)
    }
    kept = {knob.name: _why_kept(len(runs)) for index, knob in enumerate(every) if index not in chosen}
    compared = tuple(_compared(run, every, factors, estimator) for run in runs)
    beyond = max(one.measured_memory - one.estimated_memory for one in compared)
    reserved = runs[0].job.cluster.device.reserved
    if beyond > 0:
        moved[RESERVED] = (float(reserved), float(reserved + beyond))
    else:
        kept[RESERVED] = "no run took more memory than was estimated"
    return Calibration(moved, kept, compared)


def _why_kept(count: int) -> str:
    return (
        f"{count} measured {'step says' if count == 1 else 'steps say'} too little about it beside the others; runs "
        f"with other layouts, batches or models would say more"
    )


def knobs(runs: Sequence[MeasuredRun]) -> Iterator[Knob]:
    """The constants that the clusters of `runs` have, the dtypes of whose products are those of `runs`."""
    device = runs[0].job.cluster.device
    for dtype in dict.fromkeys(run.job.precision.compute for run in runs):
        yield Knob(f"device.matmul.{dtype}", device.matmul_share(dtype), 0.01, 1.0, _matmul(dtype))
    for name, lower, upper in (("stream", 0.01, 1.0), ("launch", 1e-8, 1e-2)):
        value = float(getattr(device, name))
        if value > 0:
            yield Knob(f"device.{name}", value, lower, upper, _device(name))
    links = {link.name: link for run in runs for link in run.job.cluster.links}
    for link in links.values():
        yield Knob(f"{link.name}: bandwidth", link.bandwidth, 1e3, 1e15, _link(link.name, "bandwidth"))
        if link.latency > 0:
            yield Knob(f"{link.name}: latency", link.latency, 1e-9, 10.0, _link(link.name, "latency"))


def _matmul(dtype: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    def scaled(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        device = cluster.device
        shares = dict(device.matmul) | {dtype: device.matmul_share(dtype) * factor}
        return replace(cluster, device=replace(device, matmul=tuple(shares.items())))

    return scaled


def _device(name: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    def scaled(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        device: Device = replace(cluster.device, **{name: getattr(cluster.device, name) * factor})
        return replace(cluster, device=device)

    return scaled


def _link(link_name: str, name: str) -> Callable[[ClusterSpec, float], ClusterSpec]:
    def one(link: Link, factor: float) -> Link:
        return replace(link, **{name: getattr(link, name) * factor}) if link.name == link_name else link

    def scaled(cluster: ClusterSpec, factor: float) -> ClusterSpec:
        return replace(cluster, links=tuple(one(link, factor) for link in cluster.links))

    return scaled


def _factor_bounds(knob: Knob) -> tuple[float, float]:
    """How much smaller and larger `knob` may become, as factors."""
    lower = max(knob.lower / knob.value, 1 / MOST_MOVED)
    return min(lower, 1.0), max(min(knob.upper / knob.value, MOST_MOVED), 1.0)


def _spread(chosen: Ints, factors: Floats, count: int) -> Floats:
    """`factors` of the `chosen` constants, and 1 for all others."""
    found = np.ones(count)
    found[chosen] = factors
    return found


def _job(run: MeasuredRun, every: Sequence[Knob], factors: Floats) -> Job:
    cluster = run.job.cluster
    for knob, factor in zip(every, factors, strict=True):
        cluster = cluster if factor == 1.0 else knob.scaled(cluster, float(factor))
    return replace(run.job, cluster=cluster)


def _seconds(run: MeasuredRun, every: Sequence[Knob], factors: Floats, estimator: Estimator) -> float:
    return estimator(_job(run, every, factors), run.layout).step_seconds


def _compared(run: MeasuredRun, every: Sequence[Knob], factors: Floats, estimator: Estimator) -> Compared:
    before, after = (estimator(_job(run, every, by), run.layout) for by in (np.ones(len(every)), factors))
    memory = max(stage.total - stage.reserved for stage in before.memory)
    return Compared(run.name, run.steps, run.seconds, before.step_seconds, after.step_seconds, run.peak_memory, memory)
