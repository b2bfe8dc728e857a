"""The collectives of parameters and gradients, for a batch of layouts: between data-parallel ranks, and of a table that
the first and the last pipeline rank share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.plan.memory.states import communicated_sizes, tied_grad_bytes
from kumi.plan.time.collective_times import collective_seconds
from kumi.plan.time.layer_collectives import CollectiveBatch, seconds_each
from kumi.spec.job import Job
from kumi.spec.ledger import embedding_ops
from kumi.spec.process_groups import process_group
from kumi.spec.schedules import V_SHAPED
from kumi.spec.sharding import FsdpUnit, zero_group

# `what` of the all-reduce of a tied table's gradient.
TIED_GRADS = "gradients of the tied table"


class UnitCollectives(NamedTuple):
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
    gathered, trained = communicated_sizes(job, unit, layouts)
    gather = CollectiveBatch("all_gather", group, gathered, {}, unit.name)
    reduce = CollectiveBatch("reduce_scatter", group, job.engine.grad_reduce_itemsize * trained, {}, unit.name)
    return UnitCollectives(gather, reduce, replica_all_reduce(layouts, reduce))


def replica_all_reduce(layouts: LayoutBatch, reduce: CollectiveBatch) -> CollectiveBatch:
    """Return the all-reduce over model replicas of the shards that `reduce` leaves."""
    degree, _ = process_group(layouts, reduce.group)
    return CollectiveBatch("all_reduce", "dp_replicate", reduce.bytes / degree, {}, reduce.what)


def grad_sync_group(*, routed: bool) -> str:
    """Return the name of the process group that all-reduces gradients without ZeRO."""
    return "expert_data" if routed else "data"


def tied_grad_all_reduce(job: Job, layouts: LayoutBatch) -> CollectiveBatch:
    """Return the all-reduce, once a step, of a tied token table's gradient over the first and the last pipeline rank.

    It has 0 bytes where no two ranks hold the table, and where it is frozen.
    """
    size = np.zeros(len(layouts))
    if job.model.tie_word_embeddings and not embedding_ops(job.model)[0].frozen:
        apart = (layouts.pp > 1) & ~layouts.one_of("schedule", V_SHAPED)
        size = np.where(apart, tied_grad_bytes(job, layouts), 0.0)
    return CollectiveBatch("all_reduce", "ends", size, {"update": 1}, TIED_GRADS)


def tied_grad_seconds(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the seconds of `tied_grad_all_reduce`, (rows,), which nothing hides: it follows the last backward pass."""
    seconds, sent = np.zeros(len(layouts)), tied_grad_all_reduce(job, layouts)
    rows = np.flatnonzero(sent.bytes)
    if len(rows):
        seconds[rows] = seconds_each(job, layouts.take(rows), sent._replace(bytes=sent.bytes[rows]))
    return seconds


def back_to_back_seconds(job: Job, layouts: LayoutBatch, collective: CollectiveBatch, count: Floats) -> Floats:
    """Return the seconds of `count` collectives with the bytes of `collective` in total, one after another.

    Ranks wait for each other once, and each collective has its own latency. An engine with `message_bytes` sends
    messages of that size instead of `count`.
    """
    message = job.engine.message_bytes
    count = np.maximum(1.0, np.ceil(collective.bytes / message) if message else count)
    group = process_group(layouts, collective.group)
    return collective_seconds(job.cluster, collective.kind, collective.bytes, *group, count)
