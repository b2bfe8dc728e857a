"""Seconds around the microbatches of a step: gradients reduced, weights updated, gathered and moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.plan.columns import Columns, Floats, Ints
from kumi.plan.comm import collective_seconds
from kumi.plan.distinct import distinct
from kumi.plan.kernels import stream_seconds
from kumi.plan.stages import Share
from kumi.plan.states import local_elements
from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD, SCHEDULES
from kumi.spec.ledger import embedding_ops, head_ops, kind_ops
from kumi.spec.op import Op
from kumi.spec.optim_states import bytes_per_element
from kumi.spec.precision import ITEMSIZE

# Share of a computation's seconds that communication can hide behind it: kernels of both compete for the processors
# and the memory.
HIDES = 0.85

# Seconds that computing takes longer for every second of communication that it hides: NCCL's kernels hold about an
# eighth of an H100's processors and a share of its memory's bandwidth. Fitted to NVIDIA's runs on H100 (DGX Cloud
# benchmarks).
SLOWS = 0.2

INTERLEAVED = SCHEDULES.index("interleaved")

# One float32, whatever the model.
NORM_BYTES = 4.0

# Bytes/s of host memory that one device's share of a node's processors moves in an optimizer update.
HOST_BANDWIDTH = 20e9

OFFLOADED = tuple(name for name in OFFLOAD if name not in ("none", "activations"))

# Rows that agree in these update alike.
SAME_UPDATE = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp", "zero", "schedule", "stages", "offload")


@dataclass(frozen=True)
class Held:
    """Elements of parameters on a pp rank before ZeRO divides them, dense and of experts, and the same of what is
    trained of them; its layers, and how many units it has that are gathered and reduced as one, (rows,)."""

    dense: Floats
    expert: Floats
    trained: tuple[Floats, Floats]
    layers: Floats
    units: Floats


def data_groups(x: Columns, dense: Floats, expert: Floats) -> list[tuple[Floats, Ints, Ints]]:
    """(elements, degree, stride) of the groups that divide dense and expert parameters among data-parallel ranks."""
    shards = x.dp_shard * x.cp
    expert_shards = np.maximum(1, shards * x.tp // (x.ep * x.expert_tp))
    return [(dense, shards, x.tp), (expert, expert_shards, x.ep * x.expert_tp)]


def unit_seconds(job: Job, x: Columns, ops: Sequence[Op]) -> tuple[Floats, Floats]:
    """Seconds to gather the parameters of `ops` under ZeRO-3, and to reduce their gradients under ZeRO-2 and 3."""
    first, index = distinct(x.dp_shard, x.cp, x.tp, x.ep, x.expert_tp, x.zero)
    rows = x.take(first)
    gather = scatter = np.zeros(len(rows))
    groups = (data_groups(rows, *local_elements(ops, rows, trained=trained)) for trained in (False, True))
    for (elements, degree, stride), (trained, _, _) in zip(*groups, strict=True):
        whole = job.itemsize * elements
        gather = gather + collective_seconds(job.cluster, "all_gather", whole, degree, stride)
        size = job.engine.grad_reduce_itemsize * trained
        scatter = scatter + collective_seconds(job.cluster, "reduce_scatter", size, degree, stride)
    return np.where(rows.zero == 3, gather, 0.0)[index], np.where(rows.zero >= 2, scatter, 0.0)[index]


def parameters(job: Job, x: Columns, part: Share) -> Held:
    """Parameters of a rank that holds `part`."""
    pieces = list(zip(kind_ops(job.model), part.layers, strict=True))
    pieces += [(embedding_ops(job.model), part.embedding), (head_ops(job.model), part.head)]
    dense, expert, *trained = (np.zeros(len(x)) for _ in range(4))
    for ops, count in pieces:
        own_dense, own_expert = local_elements(ops, x)
        dense, expert = dense + count * own_dense, expert + count * own_expert
        found = local_elements(ops, x, trained=True)
        trained = [sum_ + count * own for sum_, own in zip(trained, found, strict=True)]
    layers = part.layers.sum(axis=0)
    ends = np.maximum(part.embedding, part.head) if job.model.tie_word_embeddings else part.embedding + part.head
    return Held(dense, expert, (trained[0], trained[1]), layers, layers + ends)


def update(job: Job, x: Columns, rank: Ints, part: Share, forward: Floats, backward: Floats) -> dict[str, Floats]:
    """Seconds at the end (and the beginning) of a step by kind: gradients reduced, weights updated and gathered.

    `part` is what pp rank `rank` of every row holds. `forward` and `backward` are those of a microbatch, beside which
    the first weights and the last gradients travel. With virtual stages, each of them begins and ends with as many
    microbatches as the pipeline has ranks, while the gradients of those after it travel already.
    """
    beside = np.where(x.schedule == INTERLEAVED, np.minimum(x.pp, job.batch.sequences // (x.dp * x.microbatch)), 1)
    first, index = distinct(rank, *(getattr(x, name) for name in SAME_UPDATE))
    rows = x.take(first)
    own = parameters(job, rows, part.take(first))
    reduce, gather = exchange_seconds(job, rows, own)
    seconds, moved = optimizer_seconds(job, rows, own)
    pieces = np.maximum(1.0, own.layers)[index]
    exposed = _exposed(reduce[index], beside * backward, pieces, hidden_share(job, job.engine.overlap_grads))
    exposed = exposed + _exposed(gather[index], beside * forward, pieces, hidden_share(job, job.engine.overlap_params))
    # The update cannot begin before the norm of all gradients is known.
    norm = collective_seconds(job.cluster, "all_reduce", np.full(len(rows), NORM_BYTES), *norm_group(rows))
    exposed = exposed + norm[index]
    return {"dp": exposed, "optimizer": seconds[index], "offload": moved[index]}


def norm_group(x: Columns) -> tuple[Ints, Ints]:
    """(degree, stride) of the ranks that add up the norm of the gradient: one of each that holds a part of it. Where
    copies of a stage lie between its stages, they stand this far apart in the mean."""
    cut = (x.zero > 0) | (x.pp * x.tp * x.ep * x.expert_tp > 1)
    degree = np.where(cut, x.pp * x.dp_shard * x.cp * x.tp, 1)
    return degree, np.where(x.pp > 1, x.world_size // degree, 1)


def exchange_seconds(job: Job, x: Columns, own: Held) -> tuple[Floats, Floats]:
    """Seconds in which gradients are reduced once a step, and updated weights gathered: copies of everything all at
    once over all ranks that have one, what is divided unit by unit."""
    reduce = gather = np.zeros(len(x))
    for (elements, degree, stride), trained, count in zip(
        data_groups(x, own.dense, own.expert), own.trained, (own.units, own.layers), strict=True
    ):
        units = np.where(x.zero == 0, 1.0, np.maximum(1.0, count))
        size = job.engine.grad_reduce_itemsize * trained
        once = in_messages(job, "all_reduce", size, degree * x.dp_replicate, stride, units)
        cut = in_messages(job, "reduce_scatter", size, degree, stride, units)
        copies = in_messages(job, "all_reduce", size / degree, x.dp_replicate, x.tp * x.cp * x.dp_shard, units)
        reduce = reduce + np.select([x.zero == 0, x.zero == 1], [once, cut + copies], copies)
        whole = in_messages(job, "all_gather", job.itemsize * elements, degree, stride, units)
        gather = gather + np.where((x.zero == 1) | (x.zero == 2), whole, 0.0)
    return reduce, gather


def in_messages(job: Job, kind: str, size: Floats, degree: Ints, stride: Ints, units: Floats) -> Floats:
    """Seconds of collectives over `size` bytes in all, in messages of the engine's size, or else in as many as there
    are `units`, each with its own latency."""
    each = job.engine.message_bytes
    count = np.maximum(1.0, np.ceil(size / each)) if each else units
    return collective_seconds(job.cluster, kind, size, degree, stride, count)


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
    elements = np.zeros(len(x))
    for count, degree, _ in data_groups(x, *own.trained):
        elements = elements + count / np.where(x.zero >= 1, degree, 1)
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
