"""Every collective that one rank takes part in during a step, with its bytes, its link and its seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from kumi.plan.estimates import Collective
from kumi.plan.layout_batch import columns
from kumi.plan.time.collective_times import link_name
from kumi.plan.time.layer_collectives import (
    TIME_KIND,
    Message,
    embedding_messages,
    head_messages,
    layer_messages,
    message_seconds,
    norm_message,
    stage_message,
)
from kumi.plan.time.op_costs import Rows
from kumi.plan.time.unit_collectives import UnitMessages, data_group, train_seconds, unit_messages
from kumi.spec.job import Job
from kumi.spec.layout import AXES as MESH_AXES
from kumi.spec.layout import Layout
from kumi.spec.ledger import embedding_ops, head_ops, layer_ops
from kumi.spec.precision import ITEMSIZE
from kumi.spec.process_groups import process_group
from kumi.spec.schedule import placement
from kumi.spec.shard_slices import summed_over_tp, tp_copies
from kumi.spec.sharding import Unit, held_params, local_numel, stage_bounds, stage_ops, style, units

# The axes that process groups are listed as, where these differ: of dense parameters and of routed experts, of the
# norm, and of a tied table.
AXES = {"data": "dp", "expert_data": "dp", "zero": "dp_shard", "expert_dp": "dp_shard", "norm": "world", "ends": "pp"}
# What is sent once a step along an axis whose traffic is otherwise every microbatch's: too little to be charged.
ALIKE, TIED = "gradients held alike", "gradients of the tied table"


def traffic(job: Job, layout: Layout, exposed: dict[str, float], pp_rank: int = 0) -> tuple[Collective, ...]:
    """The collectives of a rank of pipeline rank `pp_rank`; what is `exposed` of each kind of seconds is dealt out to
    them by how long they take."""
    priced = collectives(job, layout, pp_rank)
    totals: dict[str, float] = {}
    for one in priced:
        totals[_kind(one)] = totals.get(_kind(one), 0.0) + one.seconds
    return tuple(
        replace(one, exposed=one.seconds * min(1.0, exposed.get(_kind(one), 0.0) / totals[_kind(one)]))
        if totals[_kind(one)]
        else one
        for one in priced
    )


def collectives(job: Job, layout: Layout, pp_rank: int = 0) -> tuple[Collective, ...]:
    """What a rank of pipeline rank `pp_rank` sends in a step, nothing hidden: the same message is listed once, with how
    often it is sent."""
    own = _Own(job, layout, pp_rank)
    counts: dict[Collective, int] = {}
    seconds: dict[Collective, float] = {}
    for entry in (*_data(own), *_layers(own), *_alike(own), *_pipeline(own), *_tied(own)):
        alike = replace(entry, count=0, seconds=0.0)
        counts[alike] = counts.get(alike, 0) + entry.count
        seconds[alike] = seconds.get(alike, 0.0) + entry.seconds
    return tuple(
        replace(entry, count=count, seconds=seconds[entry])
        for entry, count in counts.items()
        if count and entry.degree > 1 and entry.bytes
    )


class _Own:
    """What a pipeline rank holds: its operations in units of layers, and the sizes that messages are made of."""

    def __init__(self, job: Job, layout: Layout, pp_rank: int) -> None:
        self.job, self.layout, self.pp_rank = job, layout, pp_rank
        self.microbatches = job.batch.microbatches(layout)
        where, self.chunks = (
            stage_bounds(layout, job.model.num_hidden_layers),
            placement(layout.schedule, layout.pp, layout.stages)[pp_rank],
        )
        kinds, of_layer = job.model.layer_kinds()
        first = [of_layer.index(kind) for kind in range(len(kinds))]
        # Layers of a kind have equal operations: of each, the first such layer's are looked at.
        self.layers = [first[of_layer[layer]] for chunk in self.chunks for layer in range(*where[chunk])]
        self.first = 0 in self.chunks
        self.last = layout.pp * layout.stages - 1 in self.chunks
        self.x = columns([layout])
        self.rows = Rows(job, self.x)

    @cached_property
    def units_of_layers(self) -> dict[int, tuple[Unit, ...]]:
        """The FSDP units of the layers that are looked at."""
        return {layer: units(layer_ops(self.job.model, layer)) for layer in dict.fromkeys(self.layers)}

    @cached_property
    def units(self) -> list[Unit]:
        """The FSDP units of all stages of the rank, the roots last."""
        last = self.layout.pp * self.layout.stages - 1
        ends = [
            unit
            for chunk in self.chunks
            for unit in units(
                stage_ops(self.job.model, (), embedding=chunk == 0, head=chunk == last, shared=self.first)
            )
        ]
        inner = [unit for layer in self.layers for unit in self.units_of_layers[layer]]
        tables, roots = ([unit for unit in ends if (unit.name == "root") == root] for root in (False, True))
        return [*tables, *inner, *roots]


# An FSDP unit, how many like it a rank has, and the messages of one.
Counted = tuple[Unit, int, UnitMessages]


def _data(own: _Own) -> Iterator[Collective]:
    """Gradients and parameters over the data axes, unit by unit; plain data parallelism reduces all at once."""
    counts = Counter(map(id, own.units))
    every = [(unit, counts[key]) for key, unit in {id(unit): unit for unit in own.units}.items()]
    counted = [(unit, count, unit_messages(own.job, own.x, unit)) for unit, count in every]
    for routed, what in ((False, "gradients"), (True, "experts")):
        parts = [part for part in counted if (part[0].name == "experts") == routed]
        if own.layout.zero:
            yield from _divided(own, parts)
        else:
            size = sum((count * sent.reduce.bytes for _, count, sent in parts), np.zeros(1))
            message = Message("all_reduce", data_group(routed=routed), size, {}, what)
            yield from _once(own, [(message, 1)], "backward")
    yield _collective(own, norm_message(own.x), 1, "update")


def _divided(own: _Own, parts: Sequence[Counted]) -> Iterator[Collective]:
    """The messages of units that ZeRO divides: what is sent in every microbatch one by one, what is sent once a step
    together."""
    zero, times = own.layout.zero, own.microbatches
    if zero == 3:
        for unit, count, sent in parts:
            again = _gathered_again(own, unit, count)
            yield _collective(own, sent.gather, times * (count + again), "forward+backward")
    else:
        yield from _once(own, [(sent.gather, count) for _, count, sent in parts], "forward")
    if zero > 1:
        yield from (_collective(own, sent.reduce, times * count, "backward") for _, count, sent in parts)
    else:
        yield from _once(own, [(sent.reduce, count) for _, count, sent in parts], "backward")
    yield from _once(own, [(sent.copies, count) for _, count, sent in parts], "backward")


def _gathered_again(own: _Own, unit: Unit, count: int) -> int:
    """How many of `count` units like `unit` are gathered in the backward, too: those of layers but for the rank's last,
    which is not freed before it. The gradient of a lookup needs no weights, and the root stays."""
    if unit.name not in ("layer", "experts"):
        return 0
    return count - any(unit is kept for kept in own.units_of_layers[own.layers[-1]])


def _once(own: _Own, train: Sequence[tuple[Message, int]], when: str) -> Iterator[Collective]:
    """Messages of one kind that are sent one after another once a step, each so many times: ranks wait for each other
    once, and where the engine sends them in messages of its own size, these are as many."""
    alone = [count * float(message_seconds(own.job, own.x, message)[0]) for message, count in train]
    if not sum(alone):
        yield from (_collective(own, message, count, when, 0.0) for message, count in train)
        return
    total = np.asarray(sum(message.bytes * count for message, count in train))
    every = np.array([float(sum(count for _, count in train))])
    together = float(train_seconds(own.job, own.x, replace(train[0][0], bytes=total), every)[0])
    for (message, count), seconds in zip(train, alone, strict=True):
        yield _collective(own, message, count, when, together * seconds / sum(alone))


def _layers(own: _Own) -> Iterator[Collective]:
    """What ranks that share the layers, the embedding and the head send each other."""
    model, every = own.job.model, max(1, len(own.layers))
    for layer, count in Counter(own.layers).items():
        again = count * _recomputed_layers(own) / every
        yield from _listed(own, layer_messages(own.rows, layer_ops(model, layer)), count, again)
    yield from _frozen_input(own)
    if own.first:
        yield from _listed(own, embedding_messages(own.rows, model.hidden_size))
    if own.last:
        yield from _listed(own, head_messages(own.rows, head_ops(model)[-1]))


def _listed(own: _Own, messages: Iterable[Message], count: int = 1, again: float = 0.0) -> Iterator[Collective]:
    """The `messages` of a microbatch in `count` layers, `again` of which are recomputed, in a whole step."""
    recomputed = {"recompute": "full", "selective": "selective"}
    for message in messages:
        for phase, each in message.counts.items():
            layers = again if own.layout.recompute == recomputed.get(phase) else 0 if phase in recomputed else count
            often = round(float(np.max(each)) * own.microbatches * layers)
            when = "recompute" if phase in recomputed else phase
            yield _collective(own, message, often, when)


def _frozen_input(own: _Own) -> Iterator[Collective]:
    """Above a frozen embedding the first region needs no gradient of what it takes in: it is not sent."""
    model, layout = own.job.model, own.layout
    if layout.tp == 1 or model.lora is None or not own.first or not own.layers:
        return
    column = next((op for op in layer_ops(model, 0) if style(op) == "column"), None)
    if column is not None and column.source.name == "embed":
        kind = "reduce_scatter" if layout.sequence_parallel else "all_reduce"
        size = own.job.itemsize * own.rows.tokens * column.source.size
        yield _collective(own, Message(kind, "tp", size, {}, "activations"), -own.microbatches, "backward")


def _alike(own: _Own) -> Iterator[Collective]:
    """Gradients of what tp ranks hold alike and of which each has a part, in one message. Where several ranks hold one
    of more key-value heads, all heads have their place in it."""
    job, layout = own.job, own.layout
    if layout.tp == 1:
        return
    wanted = set(summed_over_tp(job.model, layout))
    elements = 0
    for param in held_params(job.model, layout, layout.rank({**dict.fromkeys(MESH_AXES, 0), "pp": own.pp_rank})):
        if param.name in wanted:
            parts = layout.tp // tp_copies(param, layout).degree
            elements += parts * local_numel(param, layout, 0)
    size = np.array([float(ITEMSIZE[job.precision.param] * elements)])
    yield _collective(own, Message("all_reduce", "tp", size, {}, ALIKE), 1, "backward")


def _recomputed_layers(own: _Own) -> int:
    some = own.layout.recompute_layers
    return len(own.layers) if some is None else min(some, len(own.layers))


def _pipeline(own: _Own) -> Iterator[Collective]:
    """Activations to the next stage and their gradients back, for every stage but the last and the first."""
    message = stage_message(own.job, own.x)
    last = own.layout.pp * own.layout.stages - 1
    forward = sum(chunk != last and chunk + 1 not in own.chunks for chunk in own.chunks)
    backward = sum(chunk != 0 and chunk - 1 not in own.chunks for chunk in own.chunks)
    for count, when, what in ((forward, "forward", message.what), (backward, "backward", "gradients")):
        yield _collective(own, replace(message, what=what), own.microbatches * count, when)


def _tied(own: _Own) -> Iterator[Collective]:
    """The gradients of a table that the first and the last stage hold, where these are on two ranks."""
    model, layout = own.job.model, own.layout
    if model.tie_word_embeddings and own.first != own.last and model.lora is None:
        elements = local_numel(embedding_ops(model)[0].params[0], layout, 0)
        size = np.array([float(ITEMSIZE[own.job.precision.param] * elements)])
        yield _collective(own, Message("all_reduce", "ends", size, {}, TIED), 1, "backward")


def stride_of(layout: Layout, axis: str) -> int:
    """Return the distance in ranks between neighbours of the group that is listed as `axis`, of dense parameters."""
    group = next((group for group, name in AXES.items() if name == axis and group != "ends"), axis)
    return int(process_group(layout, group)[1])


def _collective(own: _Own, message: Message, count: int, when: str, seconds: float | None = None) -> Collective:
    """`count` times the message `message`, which take `seconds`, or each as long as alone."""
    degree, stride = process_group(own.layout, message.group)
    if seconds is None:
        seconds = count * float(message_seconds(own.job, own.x, message)[0])
    link = link_name(own.job.cluster, stride, degree)
    size, axis = float(message.bytes[0]), AXES.get(message.group, message.group)
    return Collective(message.kind, axis, degree, size, count, when, message.what, link, seconds)


def _kind(entry: Collective) -> str:
    return "" if entry.what in (ALIKE, TIED) else TIME_KIND.get(entry.axis, "dp")
