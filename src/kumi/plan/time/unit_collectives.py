"""The collectives of parameters and gradients between data-parallel ranks, for a batch of layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.plan.memory.states import padded_elements
from kumi.plan.time.collective_times import collective_seconds
from kumi.plan.time.layer_collectives import CollectiveBatch
from kumi.spec.job import Job
from kumi.spec.process_groups import process_group
from kumi.spec.sharding import FsdpUnit, zero_group


@dataclass(frozen=True)
class UnitCollectives:
    """The collectives of one FSDP unit.

    `gather`: the all-gather of its parameters.
    `reduce`: the reduce-scatter of its gradients.
    `replicas`: the all-reduce of the sharded gradients over model replicas.
    """

    gather: CollectiveBatch
    reduce: CollectiveBatch
    replicas: CollectiveBatch


def unit_collectives(job: Job, layouts: LayoutBatch, unit: FsdpUnit) -> UnitCollectives:
    """Return the collectives of `unit` in every row of `layouts`."""
    group = zero_group(routed=unit.name == "experts")
    every, trained = padded_elements(unit, layouts)
    gather = CollectiveBatch("all_gather", group, job.itemsize * every, {}, unit.name)
    reduce = CollectiveBatch("reduce_scatter", group, job.engine.grad_reduce_itemsize * trained, {}, unit.name)
    return UnitCollectives(gather, reduce, replica_all_reduce(layouts, reduce))


def replica_all_reduce(layouts: LayoutBatch, reduce: CollectiveBatch) -> CollectiveBatch:
    """Return the all-reduce over model replicas of the shards that `reduce` leaves."""
    degree, _ = process_group(layouts, reduce.group)
    return CollectiveBatch("all_reduce", "dp_replicate", reduce.bytes / degree, {}, reduce.what)


def grad_sync_group(*, routed: bool) -> str:
    """Return the name of the process group that all-reduces gradients without ZeRO."""
    return "expert_data" if routed else "data"


def back_to_back_seconds(job: Job, layouts: LayoutBatch, collective: CollectiveBatch, count: Floats) -> Floats:
    """Return the seconds of `count` collectives with the bytes of `collective` in total, one after another.

    Ranks wait for each other once, and each collective has its own latency. An engine with `message_bytes` sends
    messages of that size instead of `count`.
    """
    message = job.engine.message_bytes
    count = np.maximum(1.0, np.ceil(collective.bytes / message) if message else count)
    group = process_group(layouts, collective.group)
    return collective_seconds(job.cluster, collective.kind, collective.bytes, *group, count)
