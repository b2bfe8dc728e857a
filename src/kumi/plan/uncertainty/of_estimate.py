"""The uncertainty of an estimate."""

from __future__ import annotations

from kumi.plan.estimates import Estimate
from kumi.plan.uncertainty.intervals import Uncertainty, uncertainty
from kumi.plan.uncertainty.margin import memory_margin
from kumi.plan.uncertainty.traits import run_traits
from kumi.spec.job import Job


def estimate_uncertainty(job: Job, estimate: Estimate) -> Uncertainty:
    """Return how far `estimate`, of `job`, may be off."""
    traits = run_traits(job, estimate.layout, dict(estimate.time))
    memory, cluster = estimate.peak_memory, job.cluster
    return uncertainty(
        traits, estimate.step_seconds, memory, cluster.device.memory, memory_margin(job), measured=cluster.measured
    )
