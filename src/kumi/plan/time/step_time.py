"""Seconds of a training step: the compute of pipeline stages, the schedule, and the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, Ints, LayoutBatch
from kumi.plan.memory.device_memory import covered_share, host_memory, num_microbatches
from kumi.plan.memory.scoring_memory import reward_jobs
from kumi.plan.pipeline.closed_forms import closed_form
from kumi.plan.pipeline.stages import RankStages, embedding_and_head_units, rank_stages
from kumi.plan.time.generation_time import generation_seconds
from kumi.plan.time.layer_collectives import seconds_each, stage_transfer
from kumi.plan.time.layer_costs import CostTable, cost_table
from kumi.plan.time.op_costs import MicrobatchCost
from kumi.plan.time.update_time import (
    MAX_OVERLAP,
    data_parallel_params,
    overlap_share,
    sharded_sizes,
    slowed_seconds,
    unit_collective_seconds,
    update_seconds,
)
from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD, RECOMPUTE
from kumi.spec.ledger import unique_layer_ops
from kumi.spec.sharding import fsdp_units

_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
_ACTIVATIONS = OFFLOAD.index("activations")
_STATES_ON_NVME = OFFLOAD.index("states-nvme")
_STATES = (OFFLOAD.index("states"), _STATES_ON_NVME)

# The fields of `StageTimes` in the order of the durations of a schedule's actions.
PASS_FIELDS = ("forward", "backward", "weight")
# The kinds of step time that are spent in microbatches.
_MICROBATCH_KINDS = ("forward", "backward", "recompute", "tp", "cp", "ep", "dp", "offload", "host")


@dataclass
class StageTimes:
    """Seconds of a microbatch on a pp rank, (rows,) each, with exposed communication.

    `forward`, `backward`, `weight`: the forward pass, input gradients and weight gradients.
    `kinds`: the same seconds by kind.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    kinds: dict[str, Floats] = field(default_factory=dict)

    @property
    def total(self) -> Floats:
        return self.forward + self.backward + self.weight


class StepTimes(NamedTuple):
    """Seconds of a step.

    `seconds`: the step, (rows,).
    `kinds`: the same seconds by kind, (rows,) each.
    `work`: seconds of a microbatch on each evaluated pp rank, (ranks, rows).
    """

    seconds: Floats
    kinds: dict[str, Floats]
    work: Floats


def step_times(
    job: Job,
    layouts: LayoutBatch,
    ranks: Ints,
    counts: Floats,
    stage_layers: Sequence[int] = (),
    costs: tuple[CostTable, Ints] | None = None,
) -> StepTimes:
    """Return the step times of `layouts`, evaluated on the pp ranks `ranks`, (ranks, rows).

    `counts`: the number of pp ranks that each entry of `ranks` represents, (ranks, rows).
    `stage_layers`: the layers of every stage, in all rows, where stages are uneven.
    `costs`: the result of `cost_table`, computed here if not given.
    """
    table, index = costs or cost_table(job, layouts)
    microbatches, repeated = num_microbatches(job, layouts), np.tile(np.arange(len(layouts)), len(ranks))
    per_rank, rank = layouts.take(repeated), ranks.ravel()
    rank_share = rank_stages(job.model, per_rank, rank, microbatches[repeated], stage_layers)
    work = stage_times(job, per_rank, rank_share, table, index[repeated])
    total = work.total.reshape(ranks.shape)
    slowest = np.argmax(total, axis=0)
    busy, send = microbatches * pick_per_row(total, slowest), stage_transfer_seconds(job, layouts)
    length = _pipeline_seconds(job, layouts, work, counts, slowest, send, microbatches)
    kinds = {
        kind: microbatches * pick_per_row(seconds.reshape(ranks.shape), slowest) for kind, seconds in work.kinds.items()
    }
    kinds["pp"], kinds["bubble"] = split_idle(layouts, length, busy, send)
    passes = job.passes.mean_forwards(1 if job.rollout is None else job.rollout.updates)
    if passes:
        # Forward passes alone: each stage in turn for the first microbatch, then the slowest stage for each other one.
        filling = (layouts.pp - 1) * send + (counts * work.forward.reshape(ranks.shape)).sum(axis=0)
        slowest_forward = work.forward.reshape(ranks.shape).max(axis=0)
        kinds["passes"] = passes * (filling + (microbatches - 1) * slowest_forward)
    if job.rollout is not None:
        # A rollout batch is generated once, and has log-probs once, for all updates with it.
        kinds["rollout"] = generation_seconds(job, layouts) / job.rollout.steps
        kinds["passes"] = kinds.get("passes", np.zeros(len(layouts))) / job.rollout.passes
        for reward_job in reward_jobs(job):
            scoring = step_times(reward_job, layouts, ranks, counts).kinds["passes"] / job.rollout.passes
            kinds["scoring"] = kinds.get("scoring", 0.0) + scoring
    if job.critic is not None:
        kinds["critic"] = _critic_seconds(job, layouts, ranks, counts, stage_layers)
    update = update_seconds(job, per_rank, rank, rank_share, work.forward, work.backward + work.weight)
    slowest_update = np.argmax(np.asarray(sum(update.values())).reshape(ranks.shape), axis=0)
    for kind, seconds in update.items():
        kinds[kind] = kinds.get(kind, 0.0) + pick_per_row(seconds.reshape(ranks.shape), slowest_update)
    return StepTimes(np.asarray(sum(kinds.values())), kinds, total)


def _critic_seconds(job: Job, layouts: LayoutBatch, ranks: Ints, counts: Floats, stage_layers: Sequence[int]) -> Floats:
    """Return the seconds of a step that train the critic of `job` and compute its values, (rows,)."""
    times = step_times(job.of_critic, layouts, ranks, counts, stage_layers)
    passes = 1 if job.rollout is None else job.rollout.passes
    # The values are computed once for all passes over a rollout batch.
    return np.asarray(times.seconds - times.kinds["passes"] * (1 - 1 / passes))


def split_idle(layouts: LayoutBatch, length: Floats, busy: Floats, send: Floats) -> tuple[Floats, Floats]:
    """Split the idle time of the slowest pp rank into (waiting for transfers, pipeline bubble).

    `length`: seconds of the pipeline; `busy`: seconds that the rank computes; `send`: seconds of a stage transfer.
    """
    idle = np.maximum(length - busy, 0.0)
    transfers = np.minimum(idle, 2 * (layouts.pp - 1) * layouts.stages * send)
    return transfers, idle - transfers


def pick_per_row(values: Floats, index: Ints) -> Floats:
    """Return `values[index[i], i]` for every row i."""
    picked: Floats = np.take_along_axis(values, index[None, :], axis=0)[0]
    return picked


def stage_times(
    job: Job, layouts: LayoutBatch, share: RankStages, table: CostTable, index: Ints, layers: Floats | None = None
) -> StageTimes:
    """Return the seconds of a microbatch on a rank with the `share` of the model.

    `index`: the rows of `table`.
    `layers`: the number of layers on the rank, where `share` is only one of its stages.
    """
    none = np.zeros(len(layouts))
    kinds = {kind: none.copy() for kind in _MICROBATCH_KINDS}
    times = StageTimes(none.copy(), none.copy(), none.copy(), kinds)
    recomputed = covered_share(layouts, share.layers.sum(axis=0) if layers is None else layers)
    for kind, cost in enumerate(table.layers):
        _add_compute(job, layouts, times, cost, index, share.layers[kind], recomputed)
        _add_layer_collectives(job, layouts, times, kind, share, cost, index, recomputed)
    _add_compute(job, layouts, times, table.head, index, share.head, none)
    _add_end_collectives(job, layouts, times, share)
    _add_compute(job, layouts, times, table.embedding, index, share.embedding, none)
    _add_offload(job, layouts, times, share)
    return times


def _add_offload(job: Job, layouts: LayoutBatch, times: StageTimes, share: RankStages) -> None:
    """Add the exposed transfers between host and device of a microbatch, which overlap with both passes."""
    offloaded = np.flatnonzero(layouts.offload)
    if not len(offloaded):
        return
    rows = layouts.take(offloaded)
    device_bandwidth, nvme_bandwidth = job.cluster.host.device_bandwidth, job.cluster.host.nvme_bandwidth
    # Parameters on NVMe pass through a host that has room for two units only: the slower link limits the transfer.
    through_host = (rows.offload == _STATES_ON_NVME) & job.engine.nvme_params
    bandwidth = np.where(through_host, min(device_bandwidth, nvme_bandwidth), device_bandwidth)
    traffic = offload_traffic(job, rows, share.take(offloaded))
    for seconds, moved in zip((times.forward, times.backward), traffic, strict=True):
        exposed = np.maximum(0.0, moved / bandwidth - MAX_OVERLAP * seconds[offloaded])
        seconds[offloaded] += exposed
        times.kinds["offload"][offloaded] += exposed


def offload_traffic(job: Job, layouts: LayoutBatch, share: RankStages) -> tuple[Floats, Floats]:
    """Return the bytes that a microbatch moves between device and host, or NVMe: (forward pass, backward pass).

    Offloaded activations are written in the forward pass and read in the backward pass. Offloaded parameters are read
    in both passes, under ZeRO-3 only the rank's shard, and gradients are written in the backward pass.
    """
    forward, backward = np.zeros(len(layouts)), np.zeros(len(layouts))
    activations = np.flatnonzero(layouts.offload == _ACTIVATIONS)
    if len(activations):
        rows, row_share = layouts.take(activations), share.take(activations)
        forward[activations] = backward[activations] = host_memory(job, rows, row_share) / row_share.in_flight
    states = np.flatnonzero(np.isin(layouts.offload, _STATES))
    if len(states):
        rows = layouts.take(states)
        params = data_parallel_params(job, rows, share.take(states))
        weights = sharded_sizes(rows, params.gathered, 3)
        forward[states] += weights
        backward[states] += weights + job.engine.grad_itemsize * sharded_sizes(rows, params.trained, 2)
    return forward, backward


def _add_compute(
    job: Job,
    layouts: LayoutBatch,
    times: StageTimes,
    cost: MicrobatchCost,
    index: Ints,
    count: Floats,
    recomputed: Floats,
) -> None:
    """Add `count` times `cost` to `times`, with a share `recomputed` of it recomputed in the backward pass.

    Where the host launches kernels more slowly than the device runs them, the difference counts as kind "host".
    """
    launch = job.cluster.device.launch * job.engine.dispatch
    forward, backward, weight = (getattr(cost, name)[index] for name in PASS_FIELDS)
    comm_forward = {axis: seconds[index] for axis, seconds in cost.comm_forward.items()}
    comm_backward = {axis: seconds[index] for axis, seconds in cost.comm_backward.items()}
    full, selective = recomputed * (layouts.recompute == _FULL), recomputed * (layouts.recompute == _SELECTIVE)
    recompute = full * forward + selective * selective_recompute_seconds(job, cost)[index]
    kernels = full * cost.kernels_forward[index] + selective * cost.kernels_forward[index] / 2
    comm_recompute = {axis: full * seconds[index] for axis, seconds in cost.comm_full.items()}
    for axis, seconds in cost.comm_selective.items():
        comm_recompute[axis] = comm_recompute[axis] + selective * seconds[index]
    host_forward = np.maximum(0.0, launch * cost.kernels_forward[index] - forward - sum(comm_forward.values()))
    launches_backward = launch * (cost.kernels_backward[index] + kernels)
    busy_backward = backward + weight + recompute + sum(comm_backward.values()) + sum(comm_recompute.values())
    host_backward = np.maximum(0.0, launches_backward - busy_backward)
    times.forward += count * (forward + sum(comm_forward.values()) + host_forward)
    times.backward += count * (busy_backward - weight + host_backward)
    times.weight += count * weight
    times.kinds["forward"] += count * forward
    times.kinds["backward"] += count * (backward + weight)
    times.kinds["recompute"] += count * recompute
    times.kinds["host"] += count * (host_forward + host_backward)
    for axis in comm_forward:
        times.kinds[axis] += count * (comm_forward[axis] + comm_backward[axis] + comm_recompute[axis])


def selective_recompute_seconds(job: Job, cost: MicrobatchCost) -> Floats:
    """Return the seconds of a layer's forward pass that selective recomputation repeats (see `Engine.selective`)."""
    if job.engine.selective == "attention":
        return cost.attention
    if job.engine.selective == "half-products":
        return cost.cheap + (cost.forward - cost.cheap - cost.core) / 2
    return cost.cheap


def _add_layer_collectives(
    job: Job,
    layouts: LayoutBatch,
    times: StageTimes,
    kind: int,
    share: RankStages,
    cost: MicrobatchCost,
    index: Ints,
    recomputed: Floats,
) -> None:
    """Add the exposed all-gathers and reduce-scatters of layers of one kind in a microbatch.

    ZeRO-3 all-gathers each layer before its forward pass and, except for the rank's last layer, before its backward
    pass. ZeRO-2 and 3 reduce-scatter its gradients after the backward pass. Each collective overlaps with the
    neighbouring layer's compute, or with its launches where the host is slower.
    """
    if not (layouts.zero >= 2).any():
        return
    count = share.layers[kind]
    gather, scatter = unit_collective_seconds(job, layouts, fsdp_units(unique_layer_ops(job.model)[kind]))
    gather_overlap, scatter_overlap = (
        overlap_share(job, overlaps) for overlaps in (job.engine.overlap_params, job.engine.overlap_grads)
    )
    launch = job.cluster.device.launch * job.engine.dispatch
    forward = np.maximum(cost.forward, launch * cost.kernels_forward)[index]
    backward = np.maximum(cost.backward + cost.weight, launch * cost.kernels_backward)[index]
    exposed_forward = slowed_seconds(gather, np.maximum(0.0, gather - gather_overlap * forward))
    recompute = recomputed * (layouts.recompute == _FULL) * forward
    freed = 1 - share.last[kind] / np.maximum(1.0, count)
    both, hidden = freed * gather + scatter, min(gather_overlap, scatter_overlap) * (backward + recompute)
    exposed_backward = slowed_seconds(both, np.maximum(0.0, both - hidden))
    times.forward += count * exposed_forward
    times.backward += count * exposed_backward
    times.kinds["dp"] += count * (exposed_forward + exposed_backward)


def _add_end_collectives(job: Job, layouts: LayoutBatch, times: StageTimes, share: RankStages) -> None:
    """Add the exposed all-gathers and reduce-scatters of the embedding and the head in a microbatch.

    The two are gathered first and reduced last, when there is nothing to overlap with. The exception is an untied head
    that is a unit of its own: its all-gather overlaps with the forward pass of the layer before, and its reduction with
    the backward pass of the layers.
    """
    if not (layouts.zero >= 2).any():
        return
    layers = np.maximum(1.0, share.layers.sum(axis=0))
    layer_forward = overlap_share(job, job.engine.overlap_params) * times.forward / layers
    backward = overlap_share(job, job.engine.overlap_grads) * times.backward
    for unit, count in embedding_and_head_units(job.model, share):
        gather, scatter = unit_collective_seconds(job, layouts, [unit])
        if unit.name == "head" and not job.engine.head_stays:
            gather = slowed_seconds(gather, np.maximum(0.0, gather - layer_forward))
            scatter = slowed_seconds(scatter, np.maximum(0.0, scatter - backward))
        times.forward += count * gather
        times.backward += count * scatter
        times.kinds["dp"] += count * (gather + scatter)


def stage_transfer_seconds(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the seconds to send one microbatch's activations to the next stage, (rows,)."""
    return seconds_each(job, layouts, stage_transfer(job, layouts))


def _pipeline_seconds(
    job: Job, layouts: LayoutBatch, work: StageTimes, counts: Floats, slowest: Ints, send: Floats, microbatches: Ints
) -> Floats:
    """Return the seconds from the first forward to the last backward pass, by the closed form of each schedule."""
    passes = [getattr(work, name).reshape(counts.shape) for name in PASS_FIELDS]
    sums = [(counts * seconds).sum(axis=0) for seconds in passes]
    busiest = [pick_per_row(seconds, slowest) for seconds in passes]
    blocking = not job.engine.overlap_pp
    return closed_form(
        layouts.schedule, layouts.pp, layouts.stages, microbatches, sums, busiest, send, blocking=blocking
    )
