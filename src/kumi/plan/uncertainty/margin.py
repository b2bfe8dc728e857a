"""The share of device memory that a plan leaves free, since estimates of memory may be too low."""

from __future__ import annotations

from math import exp

from kumi.plan.uncertainty.error_table import ErrorSample, machine_errors
from kumi.spec.job import Job

# With the default margin, a plan fits with this probability. Of 263 layouts that ran out of memory, the
# default margin refuses 95 % or more, and few that ran (benchmarks/planner_intervals.py, docs/accuracy.md).
FIT_PROBABILITY = 0.9


def memory_margin(job: Job) -> float:
    """Return the share of device memory that a plan of `job` leaves free: `job.margin`, or the default."""
    return margin_for(memory_errors(job), FIT_PROBABILITY) if job.margin is None else job.margin


def memory_errors(job: Job) -> ErrorSample:
    """Return the errors of memory estimates that stand for `job`."""
    return machine_errors("memory", job.engine.stack, job.cluster.measured)


def margin_for(sample: ErrorSample, probability: float) -> float:
    """Return the margin with which a rank's measured memory fits with `probability`, by the errors in `sample`.

    An estimate that fills 1 - margin of the device then fits with an error up to the quantile `probability`.
    """
    return 1 - exp(-max(0.0, sample.quantile(probability)))
