"""Seconds of a training step: the stages' work, the pipeline around it, gradients, parameters and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kumi.plan.layout_batch import Columns, Floats, Ints
from kumi.plan.memory.device_memory import host_memory, microbatches_of, recomputed_share
from kumi.plan.pipeline.closed_forms import closed_form
from kumi.plan.pipeline.stages import Share, end_units, share
from kumi.plan.time.layer_collectives import message_seconds, stage_message
from kumi.plan.time.layer_costs import Table, table
from kumi.plan.time.op_costs import Cost
from kumi.plan.time.update_time import HIDES, divided_elements, hidden_share, parameters, slowing, unit_seconds, update
from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD, RECOMPUTE
from kumi.spec.ledger import kind_ops
from kumi.spec.sharding import units

SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
ACTIVATIONS = OFFLOAD.index("activations")
STATES_ON_DRIVES = OFFLOAD.index("states-nvme")
STATES = (OFFLOAD.index("states"), STATES_ON_DRIVES)

SIDES = ("forward", "backward", "weight")
PER_MICROBATCH = ("forward", "backward", "recompute", "tp", "cp", "ep", "dp", "offload", "host")


@dataclass
class Stage:
    """One pp rank's seconds for a microbatch, (rows,): going forward, for input and for weight gradients, with what of
    the communication is exposed; and the same seconds by kind."""

    forward: Floats
    backward: Floats
    weight: Floats
    kinds: dict[str, Floats] = field(default_factory=dict)

    @property
    def total(self) -> Floats:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Step:
    """Seconds of a step and what they are made of, (rows,) each; `work` is each looked-at pp rank's for a microbatch,
    (ranks, rows)."""

    seconds: Floats
    kinds: dict[str, Floats]
    work: Floats


def step(
    job: Job,
    x: Columns,
    ranks: Ints,
    counts: Floats,
    stage_layers: Sequence[int] = (),
    known: tuple[Table, Ints] | None = None,
) -> Step:
    """The step of every row of `x`, from pp ranks `ranks`, each standing for `counts` like it, (ranks, rows).

    `stage_layers` are the layers of every stage, for all rows, where they are not divided evenly; `known` is what
    `table` says of `x` where that is at hand.
    """
    costs, index = known or table(job, x)
    microbatches, repeated = microbatches_of(job, x), np.tile(np.arange(len(x)), len(ranks))
    every, rank = x.take(repeated), ranks.ravel()
    part = share(job.model, every, rank, microbatches[repeated], stage_layers)
    work = stage(job, every, part, costs, index[repeated])
    total = work.total.reshape(ranks.shape)
    slowest = np.argmax(total, axis=0)
    busy, send = microbatches * pick(total, slowest), send_seconds(job, x)
    length = pipeline_seconds(job, x, work, counts, slowest, send, microbatches)
    kinds = {kind: microbatches * pick(seconds.reshape(ranks.shape), slowest) for kind, seconds in work.kinds.items()}
    kinds["pp"], kinds["bubble"] = waits(x, length, busy, send)
    ends = update(job, every, rank, part, work.forward, work.backward + work.weight)
    worst = np.argmax(np.asarray(sum(ends.values())).reshape(ranks.shape), axis=0)
    for kind, seconds in ends.items():
        kinds[kind] = kinds.get(kind, 0.0) + pick(seconds.reshape(ranks.shape), worst)
    return Step(np.asarray(sum(kinds.values())), kinds, total)


def waits(x: Columns, length: Floats, busy: Floats, send: Floats) -> tuple[Floats, Floats]:
    """What of a pipeline's `length` its slowest rank waits: for messages on their way, and for other ranks."""
    idle = np.maximum(length - busy, 0.0)
    messages = np.minimum(idle, 2 * (x.pp - 1) * x.stages * send)
    return messages, idle - messages


def pick(values: Floats, index: Ints) -> Floats:
    """`values[index[i], i]` for every row i."""
    found: Floats = np.take_along_axis(values, index[None, :], axis=0)[0]
    return found


def stage(job: Job, x: Columns, part: Share, costs: Table, index: Ints, layers: Floats | None = None) -> Stage:
    """What a rank that holds `part` does in one microbatch; of `layers` in all, where `part` is one of its stages."""
    empty = [np.zeros(len(x)) for _ in range(3)]
    found = Stage(empty[0], empty[1], empty[2], {kind: np.zeros(len(x)) for kind in PER_MICROBATCH})
    again = recomputed_share(x, part.layers.sum(axis=0) if layers is None else layers)
    for kind, cost in enumerate(costs.layers):
        _add_work(job, x, found, cost, index, part.layers[kind], again)
        _add_gathers(job, x, found, kind, part, cost, index, again)
    _add_work(job, x, found, costs.head, index, part.head, np.zeros(len(x)))
    _add_end_gathers(job, x, found, part)
    _add_work(job, x, found, costs.embedding, index, part.embedding, np.zeros(len(x)))
    _add_offload(job, x, found, part)
    return found


def _add_offload(job: Job, x: Columns, found: Stage, part: Share) -> None:
    """What moves between host and device in every microbatch, beside its forward and its backward."""
    away = np.flatnonzero(x.offload)
    if not len(away):
        return
    rows = x.take(away)
    bandwidth, drives = job.cluster.host.device_bandwidth, job.cluster.host.nvme_bandwidth
    # States on drives pass through a host that has room for two units only: the slower of the two links sets the pace.
    through = (rows.offload == STATES_ON_DRIVES) & job.engine.nvme_params
    pace = np.where(through, min(bandwidth, drives), bandwidth)
    for side, moved in zip((found.forward, found.backward), moved_bytes(job, rows, part.take(away)), strict=True):
        exposed = np.maximum(0.0, moved / pace - HIDES * side[away])
        side[away] += exposed
        found.kinds["offload"][away] += exposed


def moved_bytes(job: Job, x: Columns, part: Share) -> tuple[Floats, Floats]:
    """Bytes that a microbatch sends between device and host, or drives, in its forward and in its backward.

    Activations go and come back. Offloaded states bring their weights in both, the rank's part of them under ZeRO-3,
    and their gradients leave.
    """
    forward, backward = np.zeros(len(x)), np.zeros(len(x))
    kept = np.flatnonzero(x.offload == ACTIVATIONS)
    if len(kept):
        held = part.take(kept)
        forward[kept] = backward[kept] = host_memory(job, x.take(kept), held) / held.in_flight
    states = np.flatnonzero(np.isin(x.offload, STATES))
    if len(states):
        rows = x.take(states)
        own = parameters(job, rows, part.take(states))
        weights = job.itemsize * divided_elements(rows, own.elements, 3)
        forward[states] += weights
        backward[states] += weights + job.engine.grad_itemsize * divided_elements(rows, own.elements, 2)
    return forward, backward


def _add_work(job: Job, x: Columns, found: Stage, cost: Cost, index: Ints, count: Floats, part: Floats) -> None:
    """Adds `count` times `cost` to `found`, recomputation in a share `part` and the host's own pace included."""
    launch = job.cluster.device.launch * job.engine.dispatch
    forward, backward, weight = (getattr(cost, name)[index] for name in ("forward", "backward", "weight"))
    comm_forward = {axis: seconds[index] for axis, seconds in cost.comm_forward.items()}
    comm_backward = {axis: seconds[index] for axis, seconds in cost.comm_backward.items()}
    full, selective = part * (x.recompute == FULL), part * (x.recompute == SELECTIVE)
    again = full * forward + selective * spared(job, cost)[index]
    kernels_again = full * cost.kernels_forward[index] + selective * cost.kernels_forward[index] / 2
    comm_again = {axis: full * seconds[index] for axis, seconds in cost.comm_again.items()}
    for axis, seconds in cost.comm_selective.items():
        comm_again[axis] = comm_again[axis] + selective * seconds[index]
    slack_forward = np.maximum(0.0, launch * cost.kernels_forward[index] - forward - sum(comm_forward.values()))
    host_backward = launch * (cost.kernels_backward[index] + kernels_again)
    busy_backward = backward + weight + again + sum(comm_backward.values()) + sum(comm_again.values())
    slack_backward = np.maximum(0.0, host_backward - busy_backward)
    found.forward += count * (forward + sum(comm_forward.values()) + slack_forward)
    found.backward += count * (busy_backward - weight + slack_backward)
    found.weight += count * weight
    found.kinds["forward"] += count * forward
    found.kinds["backward"] += count * (backward + weight)
    found.kinds["recompute"] += count * again
    found.kinds["host"] += count * (slack_forward + slack_backward)
    for axis in comm_forward:
        found.kinds[axis] += count * (comm_forward[axis] + comm_backward[axis] + comm_again[axis])


def spared(job: Job, cost: Cost) -> Floats:
    """Seconds of a layer's forward pass that selective recomputation does again (see `Engine.selective`)."""
    if job.engine.selective == "attention":
        return cost.attention
    if job.engine.selective == "half-products":
        return cost.cheap + (cost.forward - cost.cheap - cost.core) / 2
    return cost.cheap


def _add_gathers(
    job: Job, x: Columns, stage: Stage, kind: int, share: Share, cost: Cost, index: Ints, part: Floats
) -> None:
    """ZeRO-3 gathers each layer before its forward and, all but a rank's last, again before its backward, and reduces
    its gradients after it, in every microbatch; each hides behind the layer before it as far as that lasts, were it the
    host that takes that long. ZeRO-2 only reduces."""
    if not (x.zero >= 2).any():
        return
    count = share.layers[kind]
    gather, scatter = unit_seconds(job, x, units(kind_ops(job.model)[kind]))
    hides_gather, hides_scatter = (
        hidden_share(job, on) for on in (job.engine.overlap_params, job.engine.overlap_grads)
    )
    launch = job.cluster.device.launch * job.engine.dispatch
    forward = np.maximum(cost.forward, launch * cost.kernels_forward)[index]
    backward = np.maximum(cost.backward + cost.weight, launch * cost.kernels_backward)[index]
    exposed_forward = slowing(gather, np.maximum(0.0, gather - hides_gather * forward))
    again = part * (x.recompute == FULL) * forward
    freed = 1 - share.last[kind] / np.maximum(1.0, count)
    both, behind = freed * gather + scatter, min(hides_gather, hides_scatter) * (backward + again)
    exposed_backward = slowing(both, np.maximum(0.0, both - behind))
    stage.forward += count * exposed_forward
    stage.backward += count * exposed_backward
    stage.kinds["dp"] += count * (exposed_forward + exposed_backward)


def _add_end_gathers(job: Job, x: Columns, stage: Stage, part: Share) -> None:
    """The same of the embedding and the head, once each way: they are needed first, when there is nothing to hide their
    gathering behind, and reduced last, but for a head that the engine frees before the layers' backward."""
    if not (x.zero >= 2).any():
        return
    frees = not (job.engine.head_stays or job.model.tie_word_embeddings)
    behind = hidden_share(job, job.engine.overlap_grads) * stage.backward
    for unit, count in end_units(job.model, part):
        gather, scatter = unit_seconds(job, x, [unit])
        hidden = behind if frees and unit.name == "root" else 0.0
        scatter = slowing(scatter, np.maximum(0.0, scatter - hidden))
        stage.forward += count * gather
        stage.backward += count * scatter
        stage.kinds["dp"] += count * (gather + scatter)


def send_seconds(job: Job, x: Columns) -> Floats:
    """Seconds to send one microbatch's activations to the next stage."""
    return message_seconds(job, x, stage_message(job, x))


def pipeline_seconds(
    job: Job, x: Columns, work: Stage, counts: Floats, slowest: Ints, send: Floats, microbatches: Ints
) -> Floats:
    """Seconds from the first forward to the last backward, by every schedule's closed form."""
    sides = [getattr(work, side).reshape(counts.shape) for side in SIDES]
    sums, most = [(counts * side).sum(axis=0) for side in sides], [pick(side, slowest) for side in sides]
    blocking = not job.engine.overlap_pp
    return closed_form(x.schedule, x.pp, x.stages, microbatches, sums, most, send, blocking=blocking)
