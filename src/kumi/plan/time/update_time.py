"""Seconds around the microbatches of a step: gradients reduced, weights updated, gathered and moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kumi.plan.layout_batch import Columns, Floats, Ints
from kumi.plan.memory.states import padded_elements
from kumi.plan.pipeline.stages import Share, end_units
from kumi.plan.time.kernel_times import stream_seconds
from kumi.plan.time.layer_collectives import Message, message_seconds, norm_message
from kumi.plan.time.unit_collectives import copies_message, data_group, train_seconds, unit_messages
from kumi.plan.unique_rows import distinct
from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD
from kumi.spec.ledger import kind_ops
from kumi.spec.optim_states import bytes_per_element
from kumi.spec.precision import ITEMSIZE
from kumi.spec.schedules import IN_ROUNDS
from kumi.spec.sharding import Unit, units, zero_degree, zero_group

# Share of a computation's seconds that communication can hide behind it: kernels of both compete for the processors
# and the memory.
HIDES = 0.85

# Seconds that computing takes longer for every second of communication that it hides: NCCL's kernels hold about an
# eighth of an H100's processors and a share of its memory's bandwidth. Fitted to NVIDIA's runs on H100 (DGX Cloud
# benchmarks).
SLOWS = 0.2


# Bytes/s of host memory that one device's share of a node's processors moves in an optimizer update.
HOST_BANDWIDTH = 20e9

OFFLOADED = tuple(name for name in OFFLOAD if name not in ("none", "activations"))

# Rows that agree in these update alike.
SAME_UPDATE = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp", "zero", "schedule", "stages", "offload")


@dataclass(frozen=True)
class Held:
    """Parameters on a pp rank, dense and of routed experts, (rows,) each: elements that are gathered, before ZeRO
    divides them, those of them that are trained, and how many FSDP units they are; and the rank's layers."""

    elements: tuple[Floats, Floats]
    trained: tuple[Floats, Floats]
    units: tuple[Floats, Floats]
    layers: Floats


def parameters(job: Job, x: Columns, part: Share) -> Held:
    """Parameters of a rank that holds `part`."""
    pieces = [(unit, count) for ops, count in zip(kind_ops(job.model), part.layers, strict=True) for unit in units(ops)]
    pieces += end_units(job.model, part)
    every, trained, counts = ([np.zeros(len(x)), np.zeros(len(x))] for _ in range(3))
    for unit, count in pieces:
        routed = unit.name == "experts"
        own, own_trained = padded_elements(unit, x)
        every[routed] = every[routed] + count * own
        trained[routed] = trained[routed] + count * own_trained
        counts[routed] = counts[routed] + count
    return Held((every[0], every[1]), (trained[0], trained[1]), (counts[0], counts[1]), part.layers.sum(axis=0))


def divided_elements(x: Columns, elements: tuple[Floats, Floats], least: int) -> Floats:
    """Dense elements and those of routed experts on a rank, divided where ZeRO's stage is `least` or more."""
    shares = (zero_degree(x, routed=routed) for routed in (False, True))
    return np.asarray(
        sum(own / np.where(x.zero >= least, share, 1) for own, share in zip(elements, shares, strict=True))
    )


def unit_seconds(job: Job, x: Columns, units: Iterable[Unit]) -> tuple[Floats, Floats]:
    """Seconds to gather `units` one after the other under ZeRO-3, and to reduce their gradients under ZeRO-2 and 3."""
    first, index = distinct(x.dp_shard, x.cp, x.tp, x.ep, x.expert_tp, x.zero)
    rows = x.take(first)
    gather = scatter = np.zeros(len(rows))
    for unit in units:
        sent = unit_messages(job, rows, unit)
        gather = gather + message_seconds(job, rows, sent.gather)
        scatter = scatter + message_seconds(job, rows, sent.reduce)
    return np.where(rows.zero == 3, gather, 0.0)[index], np.where(rows.zero >= 2, scatter, 0.0)[index]


def update(job: Job, x: Columns, rank: Ints, part: Share, forward: Floats, backward: Floats) -> dict[str, Floats]:
    """Seconds at the end (and the beginning) of a step by kind: gradients reduced, weights updated and gathered.

    `part` is what pp rank `rank` of every row holds. `forward` and `backward` are those of a microbatch, beside which
    the first weights and the last gradients travel. Where microbatches go in rounds, each stage begins and ends with as
    many of them as the pipeline has ranks, while the gradients of those after it travel already.
    """
    beside = np.where(x.one_of("schedule", IN_ROUNDS), np.minimum(x.pp, job.batch.microbatches(x)), 1)
    first, index = distinct(rank, *(getattr(x, name) for name in SAME_UPDATE))
    rows = x.take(first)
    own = parameters(job, rows, part.take(first))
    reduce, gather = exchange_seconds(job, rows, own)
    seconds, moved = optimizer_seconds(job, rows, own)
    pieces = np.maximum(1.0, own.layers)[index]
    exposed = _exposed(reduce[index], beside * backward, pieces, hidden_share(job, job.engine.overlap_grads))
    exposed = exposed + _exposed(gather[index], beside * forward, pieces, hidden_share(job, job.engine.overlap_params))
    # The update cannot begin before the norm of all gradients is known.
    norm = message_seconds(job, rows, norm_message(rows))
    exposed = exposed + norm[index]
    return {"dp": exposed, "optimizer": seconds[index], "offload": moved[index]}


def exchange_seconds(job: Job, x: Columns, own: Held) -> tuple[Floats, Floats]:
    """Seconds in which gradients are reduced once a step, and updated weights gathered: copies of everything all at
    once over all ranks that have one, what is divided unit by unit."""
    reduce = gather = np.zeros(len(x))
    for routed, elements, trained, count in zip((False, True), own.elements, own.trained, own.units, strict=True):
        if not elements.any():
            continue
        group, size = zero_group(routed=routed), job.engine.grad_reduce_itemsize * trained
        once = Message("all_reduce", data_group(routed=routed), size, {}, "gradients")
        cut = Message("reduce_scatter", group, size, {}, "gradients")
        whole = Message("all_gather", group, job.itemsize * elements, {}, "parameters")
        every, copies = np.ones(len(x)), train_seconds(job, x, copies_message(x, cut), count)
        reduced = [train_seconds(job, x, once, every), train_seconds(job, x, cut, count) + copies]
        reduce = reduce + np.select([x.zero == 0, x.zero == 1], reduced, copies)
        gathered = train_seconds(job, x, whole, count)
        gather = gather + np.where((x.zero == 1) | (x.zero == 2), gathered, 0.0)
    return reduce, gather


def _exposed(seconds: Floats, beside: Floats, pieces: Floats, hides: float) -> Floats:
    """What of `seconds`, sent in `pieces`, a share `hides` of `beside` does not hide: never the last piece."""
    return slowing(seconds, np.maximum(seconds / pieces, seconds - hides * beside)) if hides else seconds


def slowing(seconds: Floats, exposed: Floats) -> Floats:
    """What communication of `seconds`, all but `exposed` of it hidden, makes the computation beside it longer."""
    return exposed + SLOWS * (seconds - exposed)


def hidden_share(job: Job, overlaps: bool) -> float:
    """Share of a computation that communication can hide behind: none on a CPU, whose cores do both."""
    return HIDES if overlaps and job.cluster.device.kind != "cpu" else 0.0


def optimizer_seconds(job: Job, x: Columns, own: Held) -> tuple[Floats, Floats]:
    """Seconds of the update on the device (or, where the states are on the host, there), and of moving to and fro."""
    elements = divided_elements(x, own.trained, 1)
    state = bytes_per_element(job.optim, 4)
    # Gradients are read for their norm and again for the update, and cleared; weights and states are read and written.
    touched = elements * (3 * job.engine.grad_itemsize + 2 * 4 + 2 * state + 2 * job.engine.half_weights)
    device = stream_seconds(job.cluster.device, touched)
    names = np.array(OFFLOAD)[x.offload]
    on_host, on_nvme = np.isin(names, OFFLOADED), np.char.endswith(names, "-nvme")
    host = job.cluster.host
    # Masters that are the parameters come and go; else only what is computed with goes back.
    weights = job.itemsize if job.engine.half_weights else 2 * ITEMSIZE[job.precision.param]
    moved = elements * (job.engine.grad_itemsize + weights)
    away = (
        moved / host.device_bandwidth + touched / HOST_BANDWIDTH if host.device_bandwidth else np.full(len(x), np.inf)
    )
    drives = elements * 2 * (4 + state) / host.nvme_bandwidth if host.nvme_bandwidth else np.full(len(x), np.inf)
    offload = np.where(on_host, away, 0.0) + np.where(on_nvme, drives, 0.0)
    return np.where(on_host, 0.0, device), offload
