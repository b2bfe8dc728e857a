"""The step time and peak memory that a run measured, beside its estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kumi.config import ResolvedRun
from kumi.plan.estimates import bytes_as_measured
from kumi.plan.uncertainty.intervals import Interval
from kumi.plan.uncertainty.of_estimate import estimate_uncertainty
from kumi.report import phrases
from kumi.spec.layout import Layout
from kumi.train.metrics import read_metrics
from kumi.units import format_bytes

# Steps to skip: they compile kernels, warm caches, and include the preflight checks.
WARM_UP = 5


@dataclass(frozen=True)
class MeasuredSteps:
    """Measurements of the steps of a run, from metrics.jsonl.

    `seconds`: the median time of `count` steps.
    `peak_memory`: the largest peak of rank 0 in bytes.
    `estimated`: None, except in a run with rollouts.

    In a run with rollouts, every step has its own estimate. Some steps generate and some do not, so `seconds` is the
    mean there, and `estimated` is the mean of the steps' estimates by formulas alone.
    """

    seconds: float
    count: int
    peak_memory: int
    estimated: float | None = None


def measured_steps(folder: Path, layout: Layout) -> MeasuredSteps | None:
    """Return the measurements of the steps with `layout` in the run `folder`, after the warm-up; None without any."""
    entries = steps_with_layout(folder, layout)[WARM_UP:]
    if not entries:
        return None
    step_estimates = [entry["perf/planned_step_s"] for entry in entries if entry.get("perf/planned_step_s") is not None]
    seconds = [entry["perf/step_s"] for entry in entries]
    peak = max(int(entry["mem/peak_bytes"]) for entry in entries)
    if step_estimates:
        return MeasuredSteps(fmean(seconds), len(entries), peak, fmean(step_estimates))
    return MeasuredSteps(median(seconds), len(entries), peak)


def steps_with_layout(folder: Path, layout: Layout) -> list[dict[str, Any]]:
    """Return the metrics of the steps with `layout` in the run `folder`."""
    # Entries of earlier versions name no layout, and count.
    return [
        entry
        for entry in read_metrics(folder / "metrics.jsonl")
        if "perf/step_s" in entry and entry.get("layout", layout.words) == layout.words
    ]


def estimate_lines(run: ResolvedRun) -> Iterator[str]:
    """Yield a line on the step time and one on the memory: how far off the estimate, and inside which interval of it.

    Without a step after the warm-up, yield nothing.
    """
    measured = measured_steps(run.out, run.layout)
    if measured is None:
        return
    uncertainty = estimate_uncertainty(run.job, run.estimate)
    if run.step_seconds is not None:
        estimated = measured.estimated or run.step_seconds
        ratio = estimated / run.step_seconds
        bounds80, bounds90 = uncertainty.time80.scaled(ratio), uncertainty.time90.scaled(ratio)
        yield _compared("step time", measured.seconds, estimated, bounds80, bounds90, phrases.seconds)
    # The metrics are those of rank 0, and do not measure all memory. The interval is that of all memory, scaled down.
    estimated = bytes_as_measured(run.estimate.memory[0], run.cluster.device)
    share = estimated / run.estimate.peak_memory
    bounds80, bounds90 = uncertainty.memory80.scaled(share), uncertainty.memory90.scaled(share)
    yield _compared("memory", measured.peak_memory, estimated, bounds80, bounds90, format_bytes)


def _compared(
    name: str, measured: float, estimated: float, narrow: Interval, wide: Interval, write: Callable[[float], str]
) -> str:
    """Return the line on a quantity. `narrow`, `wide`: its 80 % and 90 % intervals. `write`: formats a value."""
    place = "inside the 80 %" if measured in narrow else "inside the 90 %" if measured in wide else "outside the 90 %"
    bounds = narrow if measured in narrow else wide
    return (
        f"{name} {write(measured)}, {measured / estimated - 1:+.0%} of the estimate {write(estimated)}: {place} "
        f"interval, {write(bounds.low)} to {write(bounds.high)}"
    )
