"""The messages that carry gradients and parameters between data-parallel ranks, for columns of layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kumi.plan.layout_batch import Columns, Floats
from kumi.plan.memory.states import padded_elements
from kumi.plan.time.collective_times import collective_seconds
from kumi.plan.time.layer_collectives import Message
from kumi.spec.job import Job
from kumi.spec.process_groups import process_group
from kumi.spec.sharding import Unit, zero_group


@dataclass(frozen=True)
class UnitMessages:
    """What is sent of one FSDP unit: its parameters gathered, its gradients reduced and divided, and the divided
    gradients summed over whole replicas."""

    gather: Message
    reduce: Message
    copies: Message


def unit_messages(job: Job, x: Columns, unit: Unit) -> UnitMessages:
    """The messages of `unit` in every row of `x`."""
    routed = unit.name == "experts"
    group = zero_group(routed=routed)
    every, trained = padded_elements(unit, x)
    gather = Message("all_gather", group, job.itemsize * every, {}, unit.name)
    reduce = Message("reduce_scatter", group, job.engine.grad_reduce_itemsize * trained, {}, unit.name)
    return UnitMessages(gather, reduce, copies_message(x, reduce))


def copies_message(x: Columns, reduce: Message) -> Message:
    """The sum over whole replicas of what `reduce` has divided."""
    degree, _ = process_group(x, reduce.group)
    return Message("all_reduce", "dp_replicate", reduce.bytes / degree, {}, reduce.what)


def data_group(*, routed: bool) -> str:
    """Name of the process group that sums whole gradients, where nothing is divided."""
    return "expert_data" if routed else "data"


def train_seconds(job: Job, x: Columns, message: Message, count: Floats) -> Floats:
    """Seconds of `count` messages with the bytes of `message` in all, sent one after another: ranks wait for each other
    once, and each message has its own latency. They are as many as the engine's size of messages makes, if it has one.
    """
    each = job.engine.message_bytes
    count = np.maximum(1.0, np.ceil(message.bytes / each) if each else count)
    return collective_seconds(job.cluster, message.kind, message.bytes, *process_group(x, message.group), count)
