"""Seconds outside the microbatches of a step: gradient reduction, optimizer update, parameter all-gather, offload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, Ints, LayoutBatch
from kumi.plan.memory.states import communicated_sizes
from kumi.plan.pipeline.stages import RankStages, embedding_and_head_units
from kumi.plan.time.kernel_times import stream_seconds
from kumi.plan.time.layer_collectives import CollectiveBatch, norm_all_reduce, seconds_each
from kumi.plan.time.unit_collectives import (
    back_to_back_seconds,
    grad_sync_group,
    replica_all_reduce,
    tied_grad_seconds,
    unit_collectives,
)
from kumi.plan.unique_rows import unique_rows
from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.optim_states import bytes_per_element
from kumi.spec.precision import ITEMSIZE
from kumi.spec.schedules import IN_ROUNDS
from kumi.spec.sharding import FsdpUnit, fsdp_units, zero_degree, zero_group

# Share of a computation's seconds that communication can overlap with: the kernels of both compete for processors and
# memory bandwidth.
MAX_OVERLAP = 0.85

# Seconds by which one second of overlapped communication slows the computation: NCCL's kernels occupy about an eighth
# of an H100's processors and a share of its memory bandwidth. Fitted to NVIDIA's runs on H100 (DGX Cloud benchmarks).
_OVERLAP_SLOWDOWN = 0.2

# Bytes/s of host memory that one device's share of a node's processors moves in an optimizer update.
_HOST_BANDWIDTH = 20e9

# The values of `Layout.offload` with which the host updates the parameters.
_HOST_UPDATE = tuple(name for name in OFFLOAD if name not in ("none", "activations"))

# The fields of a layout that determine its update time on a pp rank.
_UPDATE_FIELDS = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "expert_tp",
    "zero",
    "schedule",
    "stages",
    "offload",
)


class DataParallelParams(NamedTuple):
    """Parameters on a pp rank that data-parallel ranks communicate, as (dense, routed experts), (rows,) each.

    `gathered`: bytes after an all-gather, with padding.
    `trained`: padded trainable elements.
    `units`: the number of FSDP units.
    `layers`: the number of layers on the rank, (rows,).
    """

    gathered: tuple[Floats, Floats]
    trained: tuple[Floats, Floats]
    units: tuple[Floats, Floats]
    layers: Floats


def data_parallel_params(job: Job, layouts: LayoutBatch, share: RankStages) -> DataParallelParams:
    """Return the parameters of a rank with the `share` of the model."""
    counted = [
        (unit, count)
        for ops, count in zip(unique_layer_ops(job.model), share.layers, strict=True)
        for unit in fsdp_units(ops)
    ]
    counted += embedding_and_head_units(job.model, share)
    gathered, trained, counts = ([np.zeros(len(layouts)), np.zeros(len(layouts))] for _ in range(3))
    for unit, count in counted:
        part = 1 if unit.name == "experts" else 0  # of (dense, routed experts)
        unit_gathered, unit_trained = communicated_sizes(job, unit, layouts)
        gathered[part] = gathered[part] + count * unit_gathered
        trained[part] = trained[part] + count * unit_trained
        counts[part] = counts[part] + count
    return DataParallelParams(
        (gathered[0], gathered[1]), (trained[0], trained[1]), (counts[0], counts[1]), share.layers.sum(axis=0)
    )


def sharded_sizes(layouts: LayoutBatch, sizes: tuple[Floats, Floats], from_zero: int) -> Floats:
    """Return the sum of the (dense, routed) `sizes` on a rank, each sharded from ZeRO stage `from_zero` on."""
    degrees = (zero_degree(layouts, routed=routed) for routed in (False, True))
    return np.asarray(
        sum(size / np.where(layouts.zero >= from_zero, degree, 1) for size, degree in zip(sizes, degrees, strict=True))
    )


def unit_collective_seconds(job: Job, layouts: LayoutBatch, units: Iterable[FsdpUnit]) -> tuple[Floats, Floats]:
    """Return the seconds of all-gathers and of reduce-scatters of `units` in a microbatch, (rows,) each.

    Only ZeRO-3 all-gathers in every microbatch, and only ZeRO-2 and 3 reduce-scatter.
    """
    first, index = unique_rows(layouts.dp_shard, layouts.cp, layouts.tp, layouts.ep, layouts.expert_tp, layouts.zero)
    unique = layouts.take(first)
    gather = scatter = np.zeros(len(unique))
    for unit in units:
        sent = unit_collectives(job, unique, unit)
        gather = gather + seconds_each(job, unique, sent.gather)
        scatter = scatter + seconds_each(job, unique, sent.reduce)
    return np.where(unique.zero == 3, gather, 0.0)[index], np.where(unique.zero >= 2, scatter, 0.0)[index]


def update_seconds(
    job: Job, layouts: LayoutBatch, rank: Ints, share: RankStages, forward: Floats, backward: Floats
) -> dict[str, Floats]:
    """Return the seconds outside the microbatches of a step, by kind: "dp" (exposed), "pp", "optimizer" and "offload".

    `share` is the share of the model on pp rank `rank` of every row. `forward` and `backward` are seconds of a
    microbatch: the all-gather of parameters overlaps with the first forward pass, and the reduction of gradients with
    the last backward pass. In schedules that process microbatches in rounds, both overlap with one round of each stage,
    pp microbatches.
    """
    rounds = layouts.one_of("schedule", IN_ROUNDS)
    overlapped = np.where(rounds, np.minimum(layouts.pp, job.batch.microbatches(layouts)), 1)
    first, index = unique_rows(rank, *(getattr(layouts, name) for name in _UPDATE_FIELDS))
    unique = layouts.take(first)
    params = data_parallel_params(job, unique, share.take(first))
    reduce, gather = _reduce_and_gather_seconds(job, unique, params)
    update, offload = _optimizer_seconds(job, unique, params)
    pieces = np.maximum(1.0, params.layers)[index]
    exposed = _added_seconds(reduce[index], overlapped * backward, pieces, overlap_share(job, job.engine.overlap_grads))
    exposed = exposed + _added_seconds(
        gather[index], overlapped * forward, pieces, overlap_share(job, job.engine.overlap_params)
    )
    # The update waits for the norm of all gradients.
    norm = seconds_each(job, unique, norm_all_reduce(unique))
    exposed = exposed + norm[index]
    seconds = {"dp": exposed, "optimizer": update[index], "offload": offload[index]}
    if job.model.tie_word_embeddings:
        seconds["pp"] = tied_grad_seconds(job, unique)[index]
    return seconds


def _reduce_and_gather_seconds(job: Job, layouts: LayoutBatch, params: DataParallelParams) -> tuple[Floats, Floats]:
    """Return the seconds of gradient reduction, and of the all-gather of updated parameters, once a step.

    Without ZeRO all gradients are reduced in one message, with ZeRO unit by unit. ZeRO-2 and 3 reduce-scatter in every
    microbatch, so that only the all-reduce over replicas counts here; ZeRO-3 gathers in every microbatch, too.
    """
    reduce = gather = np.zeros(len(layouts))
    for routed, gathered, trained, count in zip(
        (False, True), params.gathered, params.trained, params.units, strict=True
    ):
        if not gathered.any():
            continue
        group, size = zero_group(routed=routed), job.engine.grad_reduce_itemsize * trained
        all_reduce = CollectiveBatch("all_reduce", grad_sync_group(routed=routed), size, {}, "gradients")
        reduce_scatter = CollectiveBatch("reduce_scatter", group, size, {}, "gradients")
        all_gather = CollectiveBatch("all_gather", group, gathered, {}, "parameters")
        replicas = back_to_back_seconds(job, layouts, replica_all_reduce(layouts, reduce_scatter), count)
        unsharded = back_to_back_seconds(job, layouts, all_reduce, np.ones(len(layouts)))
        zero1 = back_to_back_seconds(job, layouts, reduce_scatter, count) + replicas
        reduce = reduce + np.select([layouts.zero == 0, layouts.zero == 1], [unsharded, zero1], replicas)
        gathers = back_to_back_seconds(job, layouts, all_gather, count)
        gather = gather + np.where((layouts.zero == 1) | (layouts.zero == 2), gathers, 0.0)
    return reduce, gather


def _added_seconds(seconds: Floats, compute: Floats, pieces: Floats, overlap: float) -> Floats:
    """Return the step time that communication adds if it overlaps with a share `overlap` of `compute` seconds.

    `seconds` of communication come in `pieces`; the last piece has nothing to overlap with.
    """
    return slowed_seconds(seconds, np.maximum(seconds / pieces, seconds - overlap * compute)) if overlap else seconds


def slowed_seconds(seconds: Floats, exposed: Floats) -> Floats:
    """Return the step time that `seconds` of communication add: the exposed seconds, and the slowdown of compute."""
    return exposed + _OVERLAP_SLOWDOWN * (seconds - exposed)


def overlap_share(job: Job, overlaps: bool) -> float:
    """Return the share of a computation that communication can overlap with, 0 on a CPU, whose cores do both."""
    return MAX_OVERLAP if overlaps and job.cluster.device.kind != "cpu" else 0.0


def _optimizer_seconds(job: Job, layouts: LayoutBatch, params: DataParallelParams) -> tuple[Floats, Floats]:
    """Return the seconds of the update on the device, and of offloading: transfers, and the update on the host."""
    elements = sharded_sizes(layouts, params.trained, 1)
    state = bytes_per_element(job.optim, 4)
    # Gradients are read for the norm, read for the update, and zeroed; weights and states are read and written.
    touched = elements * (3 * job.engine.grad_itemsize + 2 * 4 + 2 * state + 2 * job.engine.half_weights)
    device = stream_seconds(job.cluster.device, touched)
    on_host = layouts.one_of("offload", _HOST_UPDATE)
    on_nvme = layouts.one_of("offload", [choice for choice in OFFLOAD if choice.endswith("-nvme")])
    host, unknown = job.cluster.host, np.full(len(layouts), np.inf)
    # Without separate master weights the parameters travel both ways; with them only the new compute weights return.
    weights = job.itemsize if job.engine.half_weights else 2 * ITEMSIZE[job.precision.param]
    moved = elements * (job.engine.grad_itemsize + weights)
    update = moved / host.device_bandwidth + touched / _HOST_BANDWIDTH if host.device_bandwidth else unknown
    nvme = elements * 2 * (4 + state) / host.nvme_bandwidth if host.nvme_bandwidth else unknown
    offload = np.where(on_host, update, 0.0) + np.where(on_nvme, nvme, 0.0)
    return np.where(on_host, 0.0, device), offload
