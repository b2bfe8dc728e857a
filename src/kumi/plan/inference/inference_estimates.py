"""Estimates of generation: memory, the largest batch, a decode step, and the answers to many prompts, by layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kumi.errors import FitError
from kumi.plan.inference.decode_step import decode_step
from kumi.plan.inference.inference_job import InferenceJob
from kumi.plan.inference.inference_layouts import inference_layouts
from kumi.plan.inference.inference_memory import (
    InferenceMemory,
    inference_memory,
    largest_batch,
    longest_context,
    usable_bytes,
)
from kumi.plan.inference.rollout_time import RolloutTime, rollout_time
from kumi.spec.cache_state import cache_bytes
from kumi.spec.layout import Layout
from kumi.units import format_bytes

# Sequences per replica where no batch is asked for, if that many fit: the default of serving engines.
_DEFAULT_SEQUENCES = 256


@dataclass(frozen=True)
class RolloutLengths:
    """The lengths of many prompts, and of the reply to each, in tokens."""

    prompts: Sequence[int]
    replies: Sequence[int]

    def share(self, index: int, replicas: int) -> RolloutLengths:
        """Return the lengths for replica `index` of `replicas`: prompts are dealt out to the replicas in turn."""
        return RolloutLengths(self.prompts[index::replicas], self.replies[index::replicas])


@dataclass(frozen=True)
class InferenceEstimate:
    """Generation in one layout, on all devices of the cluster.

    - `replicas`: groups of tp ranks, which generate different sequences.
    - `most_sequences`: the largest batch that fits, over all replicas.
    - `sequence_cache`: bytes of the cache of one sequence on a device.
    - `batch`: sequences at once, over all replicas: the number that was asked for, else the most that fit, up to 256
        per replica.
    - `longest`: tokens of each sequence that fit with this batch.
    - `memory`: bytes of a device with this batch.
    - `seconds`: of a decode step by kind; None if the batch does not fit or the speed of the device is unknown.
    - `tokens_per_second`: tokens that decode steps generate, over all replicas.
    - `rollout`: the time in which the slowest replica answers its part of the given prompts; None without prompts.
    - `rollout_tokens_per_second`: tokens of all replies / seconds of `rollout`.
    """

    layout: Layout
    replicas: int
    most_sequences: int
    sequence_cache: int
    batch: int
    longest: int
    memory: InferenceMemory
    seconds: dict[str, float] | None = None
    tokens_per_second: float | None = None
    rollout: RolloutTime | None = None
    rollout_tokens_per_second: float | None = None

    @property
    def fits(self) -> bool:
        return 0 < self.batch <= self.most_sequences

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a decode step, in which every sequence gets one token."""
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def bound_by(self) -> str:
        """The kind of `seconds` that takes most of a step; "" if `seconds` is None."""
        return "" if self.seconds is None else max(self.seconds, key=self.seconds.__getitem__)

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data, for --json."""
        derived = {"fits": self.fits, "step_seconds": self.step_seconds, "bound_by": self.bound_by}
        memory = asdict(self.memory) | {"total": self.memory.total}
        return asdict(self) | derived | {"memory": memory}


def estimate_inference(
    job: InferenceJob, context: int, *, batch: int | None = None, lengths: RolloutLengths | None = None
) -> list[InferenceEstimate]:
    """Return an estimate of each layout of a node. The fastest is first; layouts that do not fit are last.

    `context`: tokens of each sequence, prompt included. `batch`: sequences at once over all devices; the largest that
    fits, but at most 256 per replica, if None. `lengths`: prompts to answer, for `InferenceEstimate.rollout`.

    Raise FitError if no layout fits. The error names the largest batch or context that fits, if there is one.
    """
    cluster = job.cluster
    layouts = inference_layouts(job.model, cluster.devices_per_node)
    estimates = [_estimate(job, layout, context, batch, lengths) for layout in layouts]
    if not any(item.fits for item in estimates):
        raise FitError(_explain(job, estimates, context))
    return sorted(estimates, key=lambda item: (not item.fits, -_speed(item)))


def _speed(item: InferenceEstimate) -> float:
    """Return the figure that orders layouts: tokens per second, or the largest batch if the speed is unknown."""
    return item.rollout_tokens_per_second or item.tokens_per_second or item.most_sequences


def _estimate(
    job: InferenceJob, layout: Layout, context: int, batch: int | None, lengths: RolloutLengths | None
) -> InferenceEstimate:
    """Return the estimate of one layout; the arguments are those of `estimate_inference`."""
    replicas = job.cluster.devices // layout.tp
    most = largest_batch(job, layout, context)
    per_replica = min(most, _DEFAULT_SEQUENCES) if batch is None else -(-batch // replicas)
    total = per_replica * replicas if batch is None else batch
    memory = inference_memory(job, layout, per_replica, context)
    sequence_cache = cache_bytes(job.model, 1, context, job.cache_dtype, layout.tp)
    longest = longest_context(job, layout, per_replica)
    fields = (layout, replicas, most * replicas, sequence_cache, total, longest, memory)
    if not 0 < per_replica <= most or not _has_speed(job):
        return InferenceEstimate(*fields)
    step = decode_step(job, layout, np.asarray(per_replica), np.asarray(context))
    seconds = {kind: float(value) for kind, value in vars(step).items()}
    rate = total / sum(seconds.values())
    if lengths is None:
        return InferenceEstimate(*fields, seconds, rate)
    shares = (lengths.share(index, replicas) for index in range(min(replicas, len(lengths.prompts))))
    times = [rollout_time(job, layout, per_replica, share.prompts, share.replies) for share in shares]
    slowest = max(times, key=lambda time: time.seconds)
    return InferenceEstimate(*fields, seconds, rate, slowest, sum(lengths.replies) / slowest.seconds)


def _has_speed(job: InferenceJob) -> bool:
    device = job.cluster.device
    return bool(device.memory_bandwidth) and all(device.peak_flops(name) for name in {job.compute, job.weight_dtype})


def _explain(job: InferenceJob, estimates: Sequence[InferenceEstimate], context: int) -> str:
    """Return why no layout fits, with the batch or the context that would fit, if any."""
    best = max(estimates, key=lambda item: (item.most_sequences, -item.memory.weights))
    device, usable = job.cluster.device.name, format_bytes(usable_bytes(job))
    if best.most_sequences:
        return (
            f"{best.batch:,} sequences of {context:,} tokens do not fit in {job.cluster.devices} x {device}; use "
            f"--batch-size {best.most_sequences} or fewer, or a shorter --context"
        )
    least = min(estimates, key=lambda item: item.memory.weights)
    longest = max(longest_context(job, item.layout, 1) for item in estimates)
    if longest:
        return (
            f"not one sequence of {context:,} tokens fits on a {device}: its cache takes at least "
            f"{format_bytes(least.sequence_cache)} beside {format_bytes(least.memory.weights)} of weights, and "
            f"{usable} are usable; use --context {longest} or less"
        )
    return (
        f"the weights take at least {format_bytes(least.memory.weights)} of a {device}, and {usable} are usable; use "
        f"more devices per node, or devices with more memory"
    )
