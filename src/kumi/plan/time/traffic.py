"""All collectives that a rank takes part in during a step, with bytes, link and seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np

from kumi.plan.estimates import Collective
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.time.collective_times import link_name
from kumi.plan.time.layer_collectives import (
    TIME_KIND,
    CollectiveBatch,
    embedding_collectives,
    head_collectives,
    layer_collectives,
    norm_all_reduce,
    seconds_each,
    stage_transfer,
)
from kumi.plan.time.op_costs import LayoutSizes
from kumi.plan.time.unit_collectives import (
    TIED_GRADS,
    UnitCollectives,
    back_to_back_seconds,
    grad_sync_group,
    tied_grad_all_reduce,
    tied_grad_seconds,
    unit_collectives,
)
from kumi.spec.job import Job
from kumi.spec.layout import AXES as MESH_AXES
from kumi.spec.layout import Layout
from kumi.spec.ledger import embedding_ops, head_ops, layer_ops
from kumi.spec.precision import ITEMSIZE
from kumi.spec.process_groups import process_group
from kumi.spec.schedule import stage_assignment
from kumi.spec.shard_slices import partial_expert_params, partial_grad_params, tp_replicas
from kumi.spec.sharding import FsdpUnit, fsdp_units, local_numel, rank_params, stage_bounds, stage_ops, tp_style

# The axis under which a process group is listed, where it is not the group's name: groups of dense parameters and of
# routed experts, of the gradient norm, and of a tied table (the token table of a model whose head is the same matrix).
LISTED_AXES = {
    "data": "dp",
    "expert_data": "dp",
    "zero": "dp_shard",
    "expert_dp": "dp_shard",
    "norm": "world",
    "ends": "pp",
}
# `what` of the gradient all-reduces over tp and expert_tp once a step. They are not counted in the step time: the other
# traffic of these axes, in every microbatch, is much larger.
PARTIAL_GRADS = "gradients of replicated parameters"


def exposed_collectives(
    job: Job, layout: Layout, exposed: dict[str, float], pp_rank: int = 0
) -> tuple[Collective, ...]:
    """Return the collectives of a rank of pipeline rank `pp_rank`, with their shares of the exposed seconds.

    `exposed` has the exposed seconds of a step by kind. They are distributed over the collectives of the kind in
    proportion to `seconds`. The gradients of a tied table are all exposed.
    """
    listed, tied = collectives(job, layout, pp_rank), float(tied_grad_seconds(job, batch_layouts([layout]))[0])
    exposed = exposed | {TIED_GRADS: tied, "pp": max(0.0, exposed.get("pp", 0.0) - tied)}
    totals: dict[str, float] = {}
    for entry in listed:
        totals[_time_kind(entry)] = totals.get(_time_kind(entry), 0.0) + entry.seconds
    return tuple(
        replace(
            entry, exposed=entry.seconds * min(1.0, exposed.get(_time_kind(entry), 0.0) / totals[_time_kind(entry)])
        )
        if totals[_time_kind(entry)]
        else entry
        for entry in listed
    )


def collectives(job: Job, layout: Layout, pp_rank: int = 0) -> tuple[Collective, ...]:
    """Return the collectives of a rank of pipeline rank `pp_rank` in a step, with `exposed` 0.

    Collectives that differ only in count and seconds are merged.
    """
    rank = _Rank(job, layout, pp_rank)
    counts: dict[Collective, int] = {}
    seconds: dict[Collective, float] = {}
    parts = (_data_parallel, _model_parallel, _partial_grads, _pipeline, _tied_grads)
    for entry in chain.from_iterable(part(rank) for part in parts):
        key = replace(entry, count=0, seconds=0.0)
        counts[key] = counts.get(key, 0) + entry.count
        seconds[key] = seconds.get(key, 0.0) + entry.seconds
    return tuple(
        replace(entry, count=count, seconds=seconds[entry])
        for entry, count in counts.items()
        if count and entry.degree > 1 and entry.bytes
    )


class _Rank:
    """A pipeline rank: its stages, its layers, and the sizes that its collectives depend on.

    `layers`: one entry per layer of the rank: the index of the first layer of the same kind in the model.
    `has_first`, `has_last`: True if the rank has the first (last) stage of the pipeline.
    """

    def __init__(self, job: Job, layout: Layout, pp_rank: int) -> None:
        self.job, self.layout, self.pp_rank = job, layout, pp_rank
        self.microbatches = job.batch.microbatches(layout)
        bounds = stage_bounds(layout, job.model.num_hidden_layers)
        self.stages = stage_assignment(layout.schedule, layout.pp, layout.stages)[pp_rank]
        kinds, kind_of_layer = job.model.unique_layers()
        # Layers of a kind have equal operations, so that the first of the kind stands for all.
        first = [kind_of_layer.index(kind) for kind in range(len(kinds))]
        self.layers = [first[kind_of_layer[layer]] for stage in self.stages for layer in range(*bounds[stage])]
        self.has_first = 0 in self.stages
        self.has_last = layout.pp * layout.stages - 1 in self.stages
        self.layouts = batch_layouts([layout])
        self.sizes = LayoutSizes(job, self.layouts)

    @cached_property
    def layer_units(self) -> dict[int, tuple[FsdpUnit, ...]]:
        """FSDP units by layer, for the distinct entries of `layers`."""
        return {layer: fsdp_units(layer_ops(self.job.model, layer)) for layer in dict.fromkeys(self.layers)}

    @cached_property
    def units(self) -> list[FsdpUnit]:
        """FSDP units of all stages of the rank, the heads and roots last."""
        last = self.layout.pp * self.layout.stages - 1
        ends = [
            unit
            for stage in self.stages
            for unit in fsdp_units(
                stage_ops(self.job.model, (), embedding=stage == 0, head=stage == last, shared=self.has_first)
            )
        ]
        inner = [unit for layer in self.layers for unit in self.layer_units[layer]]
        tables = [unit for unit in ends if unit.name == "embedding"]
        return [*tables, *inner, *(unit for unit in ends if unit.name != "embedding")]


# An FSDP unit, the number of equal units on the rank, and the collectives of one unit.
_CountedUnit = tuple[FsdpUnit, int, UnitCollectives]


def _data_parallel(rank: _Rank) -> Iterator[Collective]:
    """Yield the collectives of gradients and parameters over the data axes.

    ZeRO communicates unit by unit; plain data parallelism reduces all gradients at once.
    """
    counts = Counter(map(id, rank.units))
    distinct = [(unit, counts[key]) for key, unit in {id(unit): unit for unit in rank.units}.items()]
    counted = [(unit, count, unit_collectives(rank.job, rank.layouts, unit)) for unit, count in distinct]
    for routed, what in ((False, "gradients"), (True, "experts")):
        matching = [entry for entry in counted if (entry[0].name == "experts") == routed]
        if rank.layout.zero:
            yield from _zero(rank, matching)
        else:
            size = sum((count * sent.reduce.bytes for _, count, sent in matching), np.zeros(1))
            grads = CollectiveBatch("all_reduce", grad_sync_group(routed=routed), size, {}, what)
            yield from _once_per_step(rank, [(grads, 1)], "backward")
    yield _collective(rank, norm_all_reduce(rank.layouts), 1, "update")


def _zero(rank: _Rank, counted: Sequence[_CountedUnit]) -> Iterator[Collective]:
    """Yield the collectives of sharded FSDP units.

    Collectives that run in every microbatch are timed one by one; those that run once a step are timed back to back.
    """
    zero, microbatches = rank.layout.zero, rank.microbatches
    if zero == 3:
        for unit, count, sent in counted:
            gathers = count + _backward_gathers(rank, unit, count)
            yield _collective(rank, sent.gather, microbatches * gathers, "forward+backward")
    else:
        yield from _once_per_step(rank, [(sent.gather, count) for _, count, sent in counted], "forward")
    if zero > 1:
        yield from (_collective(rank, sent.reduce, microbatches * count, "backward") for _, count, sent in counted)
    else:
        yield from _once_per_step(rank, [(sent.reduce, count) for _, count, sent in counted], "backward")
    yield from _once_per_step(rank, [(sent.replicas, count) for _, count, sent in counted], "backward")


def _backward_gathers(rank: _Rank, unit: FsdpUnit, count: int) -> int:
    """Return how many of `count` units equal to `unit` ZeRO-3 gathers a second time, in the backward pass.

    These are all layers except the rank's last, which stays gathered. The gradient of an embedding needs no weights,
    and the head and the root stay gathered.
    """
    if unit.name not in ("layer", "experts"):
        return 0
    return count - any(unit is last for last in rank.layer_units[rank.layers[-1]])


def _once_per_step(rank: _Rank, queue: Sequence[tuple[CollectiveBatch, int]], when: str) -> Iterator[Collective]:
    """Yield the collectives of `queue`, (collective, count) of one kind, which run back to back once a step.

    Their total time is `back_to_back_seconds`, distributed in proportion to their separate times.
    """
    separate = [count * float(seconds_each(rank.job, rank.layouts, sent)[0]) for sent, count in queue]
    if not sum(separate):
        yield from (_collective(rank, sent, count, when, 0.0) for sent, count in queue)
        return
    size = np.asarray(sum(sent.bytes * count for sent, count in queue))
    total_count = np.array([float(sum(count for _, count in queue))])
    merged = queue[0][0]._replace(bytes=size)
    together = float(back_to_back_seconds(rank.job, rank.layouts, merged, total_count)[0])
    for (sent, count), seconds in zip(queue, separate, strict=True):
        yield _collective(rank, sent, count, when, together * seconds / sum(separate))


def _model_parallel(rank: _Rank) -> Iterator[Collective]:
    """Yield the tensor, context and expert-parallel collectives of the layers, the embedding and the head."""
    model, num_layers = rank.job.model, max(1, len(rank.layers))
    for layer, count in Counter(rank.layers).items():
        recomputed = count * _recomputed_layers(rank) / num_layers
        yield from _in_step(rank, layer_collectives(rank.sizes, layer_ops(model, layer)), count, recomputed)
    yield from _skipped_input_gradient(rank)
    if rank.has_first:
        yield from _in_step(rank, embedding_collectives(rank.sizes, model.hidden_size))
    if rank.has_last:
        yield from _in_step(rank, head_collectives(rank.sizes, head_ops(model)[-1]))


def _in_step(
    rank: _Rank, layer: Iterable[CollectiveBatch], count: int = 1, recomputed: float = 0.0
) -> Iterator[Collective]:
    """Yield the collectives in a step of `count` layers like `layer`; `recomputed` of the layers are recomputed."""
    recomputations = {"recompute": "full", "selective": "selective"}
    for collective in layer:
        for phase, each in collective.counts.items():
            if phase in recomputations:
                layers, when = recomputed if rank.layout.recompute == recomputations[phase] else 0, "recompute"
            else:
                layers, when = count, phase
            yield _collective(rank, collective, round(float(np.max(each)) * rank.microbatches * layers), when)


def _skipped_input_gradient(rank: _Rank) -> Iterator[Collective]:
    """Yield a negative count for the gradient of the first layer's input above a frozen embedding: it is not needed."""
    model, layout = rank.job.model, rank.layout
    if layout.tp == 1 or model.lora is None or not rank.has_first or not rank.layers:
        return
    first = (*embedding_ops(model), *layer_ops(model, 0))
    position = next((position for position, op in enumerate(first) if tp_style(op) == "column"), None)
    if position is None or any(not param.frozen for op in first[:position] for param in op.params):
        return
    column = first[position]
    if column.source.name == "embed":
        kind = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
        size = rank.job.itemsize * rank.sizes.tokens * column.source.size
        yield _collective(rank, CollectiveBatch(kind, "tp", size, {}, "activations"), -rank.microbatches, "backward")


def _partial_grads(rank: _Rank) -> Iterator[Collective]:
    """Yield the all-reduces over tp and expert_tp of the partial gradients of replicated parameters, one message each.

    The message over tp has a place for every key-value head, also where several ranks share a head.
    """
    job, layout = rank.job, rank.layout
    names, experts = (set(partial(job.model, layout)) for partial in (partial_grad_params, partial_expert_params))
    own = rank_params(job.model, layout, layout.rank({**dict.fromkeys(MESH_AXES, 0), "pp": rank.pp_rank}))
    shards = {param: local_numel(param, layout, 0) for param in own if param.name in names | experts}
    slots = {param: layout.tp // tp_replicas(param, layout).degree for param in shards if param.name in names}
    elements = {
        "tp": sum(count * shards[param] for param, count in slots.items()),
        "expert_tp": sum(shards[param] for param in shards if param.name in experts),
    }
    for group, degree in (("tp", layout.tp), ("expert_tp", layout.expert_tp)):
        if degree > 1 and (group == "tp" or elements[group]):
            size = np.array([float(ITEMSIZE[job.precision.param] * elements[group])])
            yield _collective(rank, CollectiveBatch("all_reduce", group, size, {}, PARTIAL_GRADS), 1, "backward")


def _recomputed_layers(rank: _Rank) -> int:
    """Return the number of layers that the rank recomputes, if it recomputes."""
    limit = rank.layout.recompute_layers
    return len(rank.layers) if limit is None else min(limit, len(rank.layers))


def _pipeline(rank: _Rank) -> Iterator[Collective]:
    """Yield the sends of activations to the next stage and of gradients to the previous one, if on another rank."""
    transfer = stage_transfer(rank.job, rank.layouts)
    last = rank.layout.pp * rank.layout.stages - 1
    forward = sum(stage != last and stage + 1 not in rank.stages for stage in rank.stages)
    backward = sum(stage != 0 and stage - 1 not in rank.stages for stage in rank.stages)
    for count, when, what in ((forward, "forward", transfer.what), (backward, "backward", "gradients")):
        yield _collective(rank, transfer._replace(what=what), rank.microbatches * count, when)


def _tied_grads(rank: _Rank) -> Iterator[Collective]:
    """Yield the all-reduce of a tied table's gradients if first and last stage are on different ranks."""
    sent = tied_grad_all_reduce(rank.job, rank.layouts)
    if rank.has_first != rank.has_last and sent.bytes[0]:
        yield _collective(rank, sent, 1, "backward")


def listed_stride(layout: Layout, axis: str, degree: int) -> int:
    """Return the distance in ranks between neighbours of the group of `degree` ranks that is listed as `axis`.

    Several groups may be listed under one axis (see `LISTED_AXES`), such as those of dense parameters and of experts.
    Of these, it is the first with `degree` ranks.
    """
    names = [group for group, name in LISTED_AXES.items() if name == axis]
    groups = [
        process_group(layout, name) for name in (names if axis in ("dp", "dp_shard", "world") else [axis, *names])
    ]
    return int(next((stride for size, stride in groups if size == degree), groups[0][1]))


def _collective(rank: _Rank, sent: CollectiveBatch, count: int, when: str, seconds: float | None = None) -> Collective:
    """Return `count` occurrences of `sent` as a `Collective`; `seconds` is by default `count` x `seconds_each`."""
    degree, stride = process_group(rank.layout, sent.group)
    if seconds is None:
        seconds = count * float(seconds_each(rank.job, rank.layouts, sent)[0])
    link = link_name(rank.job.cluster, stride, degree)
    size, axis = float(sent.bytes[0]), LISTED_AXES.get(sent.group, sent.group)
    return Collective(sent.kind, axis, degree, size, count, when, sent.what, link, seconds)


def _time_kind(entry: Collective) -> str:
    """Return the kind of step time that `entry` counts as: "" for none, TIED_GRADS for that part of "pp"."""
    if entry.what == TIED_GRADS:
        return TIED_GRADS
    return "" if entry.what == PARTIAL_GRADS else TIME_KIND.get(entry.axis, "dp")
