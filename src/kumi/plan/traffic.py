"""Every collective that one rank takes part in during a step, with its bytes, its link and its seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from kumi.plan.columns import columns
from kumi.plan.comm import collective_seconds, link_name
from kumi.plan.context import dealt_elements, gradient_itemsize, kv_elements
from kumi.plan.stages import bounds
from kumi.plan.states import elements
from kumi.plan.tensor import Regions, regions
from kumi.plan.types import Collective
from kumi.plan.update import NORM_BYTES
from kumi.spec.job import Job
from kumi.spec.layout import AXES, Layout
from kumi.spec.ledger import Op, embedding_ops, layer_ops, logit_chunk
from kumi.spec.placement import process_group, splits_gradients
from kumi.spec.precision import ITEMSIZE
from kumi.spec.regions import summed_over_tp, tp_copies
from kumi.spec.schedule import placement
from kumi.spec.sharding import AXIS, Unit, held_params, local_numel, stage_ops, style, units

INT64 = 8.0
# Axes that are several process groups: of dense parameters and of routed experts.
GROUPS = {"dp": ("data", "expert_data"), "dp_shard": ("zero", "expert_dp"), "world": ("norm", "norm")}
# What is sent once a step along an axis whose traffic is otherwise every microbatch's: too little to be charged.
ALIKE, TIED = "gradients held alike", "gradients of the tied table"
# Which kind of seconds of a step an axis' traffic is counted as.
TIME_KIND = {"tp": "tp", "cp": "cp", "ep": "ep", "expert_tp": "ep", "pp": "pp"}


def traffic(job: Job, layout: Layout, exposed: dict[str, float], pp_rank: int = 0) -> tuple[Collective, ...]:
    """The collectives of a rank of pipeline rank `pp_rank`; what is `exposed` of each kind of seconds is dealt out to
    them by how long they take."""
    priced = [_priced(job, layout, one) for one in collectives(job, layout, pp_rank)]
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
    """What a rank of pipeline rank `pp_rank` sends in a step, not priced: the same message is listed once, with how
    often it is sent."""
    own = _Own(job, layout, pp_rank)
    counts: dict[Collective, int] = {}
    for one in (*_data(own), *_tensor(own), *_context(own), *_expert(own), *_pipeline(own), *_tied(own)):
        alike = replace(one, count=0)
        counts[alike] = counts.get(alike, 0) + one.count
    return tuple(replace(one, count=count) for one, count in counts.items() if count and one.degree > 1 and one.bytes)


class _Own:
    """What a pipeline rank holds: its operations in units of layers, and the sizes that messages are made of."""

    def __init__(self, job: Job, layout: Layout, pp_rank: int) -> None:
        self.job, self.layout, self.pp_rank = job, layout, pp_rank
        self.microbatches = job.batch.microbatches(layout)
        where, self.chunks = bounds(layout, job.model), placement(layout.schedule, layout.pp, layout.stages)[pp_rank]
        kinds, of_layer = job.model.layer_kinds()
        first = [of_layer.index(kind) for kind in range(len(kinds))]
        # Layers of a kind have equal operations: of each, the first such layer's are looked at.
        self.layers = [first[of_layer[layer]] for chunk in self.chunks for layer in range(*where[chunk])]
        self.first = 0 in self.chunks
        self.last = layout.pp * layout.stages - 1 in self.chunks
        self.tokens = layout.microbatch * job.batch.seq_len / layout.cp
        self.size = job.itemsize
        self.wide = max(4, self.size)
        self.hidden = self.size * self.tokens * job.model.hidden_size
        self.sequence_parallel = layout.sequence_parallel and layout.tp > 1

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


def _data(own: _Own) -> Iterator[Collective]:
    """Gradients and parameters over the data axes, unit by unit; plain data parallelism reduces all at once."""
    job, layout, times = own.job, own.layout, own.microbatches
    reduced, whole = float(job.engine.grad_reduce_itemsize), float(job.itemsize)
    every, counts = {id(unit): unit for unit in own.units}, Counter(map(id, own.units))
    sizes = {key: _sizes(job, layout, unit) for key, unit in every.items()}
    if layout.zero == 0:
        for routed, what in ((False, "gradients"), (True, "experts")):
            size = reduced * sum(sizes[id(unit)][1] for unit in own.units if (unit.name == "experts") == routed)
            yield Collective("all_reduce", "dp", _degree(layout, "dp", what), size, 1, "backward", what)
        yield _norm(layout)
        return
    # The last layer is not freed before its backward.
    kept = {id(unit) for unit in own.units_of_layers[own.layers[-1]]} if own.layers else set()
    when = "forward+backward" if layout.zero == 3 else "forward"
    for key, unit in every.items():
        count, (size, trained), degree = counts[key], sizes[key], _degree(layout, "dp_shard", unit.name)
        again = count - (key in kept) if unit.name in ("layer", "experts") else 0
        gathers, reduces = (
            times * (count + again) if layout.zero == 3 else count,
            count if layout.zero == 1 else count * times,
        )
        yield Collective("all_gather", "dp_shard", degree, whole * size, gathers, when, unit.name)
        yield Collective("reduce_scatter", "dp_shard", degree, reduced * trained, reduces, "backward", unit.name)
        share = reduced * trained / degree
        yield Collective("all_reduce", "dp_replicate", layout.dp_replicate, share, count, "backward", unit.name)
    yield _norm(layout)


def _norm(layout: Layout) -> Collective:
    count = int(splits_gradients(layout))
    return Collective("all_reduce", "world", _degree(layout, "world"), NORM_BYTES, count, "update", "norm")


def _sizes(job: Job, layout: Layout, unit: Unit) -> tuple[float, float]:
    """Elements of the parameters of `unit` as they travel, and of those that are trained: cut by tp and ep, and padded
    so that all ranks that divide them have equally many."""
    found = elements(job, unit.ops, columns([layout]))
    return float(found.padded[0]), float(found.trained_padded[0])


def _tensor(own: _Own) -> Iterator[Collective]:
    """Around the matrices of every layer, at the embedding and at the head, and what ranks hold alike once a step."""
    if own.layout.tp == 1:
        return
    every, again = max(1, len(own.layers)), _recomputed_layers(own) if own.layout.recompute != "none" else 0
    for layer, count in Counter(own.layers).items():
        found = regions(layer_ops(own.job.model, layer))
        times = own.microbatches * count
        yield from _around(own, found, times, round(times * again / every))
        yield from _adapters(own, layer_ops(own.job.model, layer), times, round(times * again / every))
    yield from _first(own)
    yield from _ends(own)
    yield from _alike(own)


def _first(own: _Own) -> Iterator[Collective]:
    """Above a frozen embedding the first region needs no gradient of what it takes in: it is not sent."""
    model = own.job.model
    if model.lora is None or not own.first or not own.layers:
        return
    column = next((op for op in layer_ops(model, 0) if style(op) == "column"), None)
    if column is not None and column.source.name == "embed":
        kind = "reduce_scatter" if own.sequence_parallel else "all_reduce"
        yield _message(own, kind, column.source.size, -own.microbatches, "backward", "activations")


def _around(own: _Own, found: Regions, times: int, again: int) -> Iterator[Collective]:
    """The messages of a layer, whose backward makes `again` of its `times` forward passes once more. Selective
    recomputation keeps what came of messages, but for what a region only reads."""
    full = own.layout.recompute == "full"
    entering, kept = (("all_gather", times) if own.sequence_parallel else ("", 0)), again if full else 0
    for width in found.enter:
        yield _message(own, entering[0], width, entering[1], "forward", "activations")
        yield _message(own, entering[0], width, kept, "recompute", "activations")
        yield _message(
            own, "reduce_scatter" if own.sequence_parallel else "all_reduce", width, times, "backward", "activations"
        )
        if own.job.model.lora is None:
            yield _message(own, entering[0], width, entering[1], "backward", "inputs of weight gradients")
    for width in found.share:
        yield _message(own, entering[0], width, entering[1], "forward", "activations")
        yield _message(own, entering[0], width, again, "recompute", "activations")
        yield _message(
            own, "reduce_scatter" if own.sequence_parallel else "all_reduce", width, times, "backward", "activations"
        )
    for number, width in enumerate(found.leave):
        # What ends a layer gives nothing that its backward pass reads.
        ends = found.ends and number == len(found.leave) - 1 and not own.job.engine.recompute_whole
        repeated = 0 if ends else kept
        kind = "reduce_scatter" if own.sequence_parallel else "all_reduce"
        yield _message(own, kind, width, times, "forward", "activations")
        yield _message(own, kind, width, repeated, "recompute", "activations")
        if own.sequence_parallel:
            yield _message(own, "all_gather", width, times, "backward", "activations")
    square = own.wide * own.tokens
    for when, often in (("forward", times), ("backward", times), ("recompute", kept)):
        yield Collective("all_reduce", "tp", own.layout.tp, square, found.norms * often, when, "norms")


def _adapters(own: _Own, ops: Sequence[Op], times: int, again: int) -> Iterator[Collective]:
    """What adapters beside matrices cut by columns make of the tokens between regions, gathered once for all that read
    the same input: thin. And, for DoRA, squares of rows of which each rank has some columns."""
    kept = again if own.layout.recompute == "full" else 0
    for op in ops:
        if op.kind == "lora" and len(op.params) > 2 and AXIS.get(op.source.name) == "tp":
            squares = own.wide * op.target.size
            for when, count in (("forward", times), ("recompute", kept)):
                yield Collective("all_reduce", "tp", own.layout.tp, squares, count, when, "norms of adapted matrices")
    if not own.sequence_parallel:
        return
    ranks, widths = {op.name.removesuffix(".lora"): op.rank for op in ops if op.kind == "lora"}, list[int]()
    before = None
    for op in ops:
        if style(op) == "column" and op.kind == "linear":
            if before is None or before.source != op.source:
                widths.append(0)
            widths[-1] += ranks.get(op.name, 0)
        before = op if style(op) == "column" else None
    for width in widths:
        for kind, count, when in (
            ("all_gather", times, "forward"),
            ("all_gather", kept, "recompute"),
            ("reduce_scatter", times, "backward"),
        ):
            yield _message(own, kind, width, count, when, "adapters")


def _message(own: _Own, kind: str, width: float, count: int, when: str, what: str) -> Collective:
    """`width` elements of every token."""
    size = own.size * own.tokens * width
    return Collective(kind, "tp", own.layout.tp, size, count if kind else 0, when, what)


def _ends(own: _Own) -> Iterator[Collective]:
    """At the embedding, and at the head, which forms its gradient at once and sends two numbers a token besides."""
    hidden, first, last = own.job.model.hidden_size, own.microbatches * own.first, own.microbatches * own.last
    if own.sequence_parallel:
        yield _message(own, "reduce_scatter", hidden, first, "forward", "embedding")
        if own.job.model.lora is None:
            yield _message(own, "all_gather", hidden, first, "backward", "embedding")
        yield _message(own, "all_gather", hidden, last, "forward", "head")
        yield _message(own, "reduce_scatter", hidden, last, "backward", "head")
        again = last * own.job.engine.recompute_whole
        yield _message(own, "all_gather", hidden, again, "backward", "inputs of weight gradients")
    else:
        yield _message(own, "all_reduce", hidden, first, "forward", "embedding")
        yield _message(own, "all_reduce", hidden, last, "backward", "head")
    tp, rows = own.layout.tp, -(-own.job.model.vocab_size // own.layout.tp)
    chunk = min(logit_chunk(rows, own.job.cluster.device.kind), round(own.tokens))
    each = 2 * tp * own.wide
    whole, rest = divmod(round(own.tokens), chunk)
    yield Collective("all_gather", "tp", tp, each * chunk, whole * last, "forward", "log-probs")
    yield Collective("all_gather", "tp", tp, each * rest, last, "forward", "log-probs")


def _alike(own: _Own) -> Iterator[Collective]:
    """Gradients of what tp ranks hold alike and of which each has a part, in one message. Where several ranks hold one
    of more key-value heads, all heads have their place in it."""
    job, layout = own.job, own.layout
    wanted = set(summed_over_tp(job.model, layout))
    elements = 0
    for param in held_params(job.model, layout, layout.rank({**dict.fromkeys(AXES, 0), "pp": own.pp_rank})):
        if param.name in wanted:
            parts = layout.tp // tp_copies(param, layout).degree
            elements += parts * local_numel(param, layout, 0)
    size = float(ITEMSIZE[job.precision.param] * elements)
    yield Collective("all_reduce", "tp", layout.tp, size, 1, "backward", ALIKE)


def _recomputed_layers(own: _Own) -> int:
    some = own.layout.recompute_layers
    return len(own.layers) if some is None else min(some, len(own.layers))


def _context(own: _Own) -> Iterator[Collective]:
    """Keys and values go round the ring, in the backward with their gradients, or heads are dealt out (see
    `kumi.plan.context`)."""
    layout, every = own.layout, max(1, len(own.layers))
    again = own.microbatches * _recomputed_layers(own) / every if layout.recompute == "full" else 0
    times = {"forward": own.microbatches, "backward": own.microbatches, "recompute": again}
    for layer, count in Counter(own.layers).items():
        for op in layer_ops(own.job.model, layer):
            if op.kind != "attention":
                continue
            for when, often in times.items():
                for kind, size, what in _exchanged(own, op, when):
                    rounds = round((layout.cp - 1 if kind == "send" else 1) * count * often)
                    yield Collective(kind, "cp", layout.cp, own.tokens * size, rounds, when, what)


def _exchanged(own: _Own, op: Op, when: str) -> Iterator[tuple[str, float, str]]:
    """Kinds of messages of `op` in a pass, the bytes of a token in one, and what it is."""
    gradients = "gradients of " if when == "backward" else ""
    if own.layout.context == "ulysses":
        heads, results = dealt_elements(op, own.layout.tp, own.layout.cp)
        yield "all_to_all", own.size * heads, f"{gradients}queries, keys and values"
        yield "all_to_all", own.size * results, f"{gradients}results"
        return
    elements = kv_elements(op, own.layout.tp)
    yield "send", own.size * elements, "keys and values"
    if gradients:
        yield "send", gradient_itemsize(own.job) * elements, "gradients of keys and values"


def _expert(own: _Own) -> Iterator[Collective]:
    """Tokens go to their experts and come back, in every layer of experts; ranks tell each other first how many.

    Ranks of expert_tp gather each other's tokens, choices and weights before, and divide the sums after.
    """
    layout, kinds = own.layout, Counter(own.layers)
    again = _recomputed_layers(own) / max(1, len(own.layers)) if layout.recompute == "full" else 0
    for layer, count in kinds.items():
        ops = layer_ops(own.job.model, layer)
        passes = next((op.passes for op in ops if op.kind == "dispatch"), 0)
        if not passes:
            continue
        times = own.microbatches * count
        size = own.hidden * passes / (layout.tp if own.sequence_parallel else 1)
        experts = max(op.experts for op in ops)
        for when, often in (("forward", times), ("backward", times), ("recompute", round(times * again))):
            what = "gradients of tokens" if when == "backward" else "tokens"
            yield Collective("all_to_all", "ep", layout.ep, size * layout.expert_tp, 2 * often, when, what)
            if when != "backward":
                yield Collective("all_to_all", "ep", layout.ep, INT64 * experts, often, when, "counts")
            yield from _gathered_tokens(own, size, passes, often, when)


def _gathered_tokens(own: _Own, size: float, passes: float, often: int, when: str) -> Iterator[Collective]:
    """Around experts that are cut: hidden states, choices and their weights go to all ranks that have a part, sums come
    back divided; backward the reverse, without the choices."""
    parts, tokens = own.layout.expert_tp, own.tokens / (own.layout.tp if own.sequence_parallel else 1)
    hidden = size / passes * parts
    weights = tokens * parts * passes * own.wide
    there, back = ("reduce_scatter", "all_gather") if when == "backward" else ("all_gather", "reduce_scatter")
    yield Collective(there, "expert_tp", parts, hidden, often, when, "tokens")
    yield Collective(there, "expert_tp", parts, weights, often, when, "weights")
    if when != "backward":
        yield Collective(there, "expert_tp", parts, tokens * parts * passes * INT64, often, when, "choices")
    if when != "recompute":
        yield Collective(back, "expert_tp", parts, hidden, often, when, "sums")


def _pipeline(own: _Own) -> Iterator[Collective]:
    """Activations to the next stage and their gradients back, for every stage but the last and the first."""
    size = own.hidden / (own.layout.tp if own.sequence_parallel else 1)
    last = own.layout.pp * own.layout.stages - 1
    forward = sum(chunk != last and chunk + 1 not in own.chunks for chunk in own.chunks)
    backward = sum(chunk != 0 and chunk - 1 not in own.chunks for chunk in own.chunks)
    yield Collective("send", "pp", own.layout.pp, size, own.microbatches * forward, "forward", "activations")
    yield Collective("send", "pp", own.layout.pp, size, own.microbatches * backward, "backward", "gradients")


def _tied(own: _Own) -> Iterator[Collective]:
    """The gradients of a table that the first and the last stage hold, where these are on two ranks."""
    model, layout = own.job.model, own.layout
    if model.tie_word_embeddings and own.first != own.last and model.lora is None:
        elements = local_numel(embedding_ops(model)[0].params[0], layout, 0)
        size = float(ITEMSIZE[own.job.precision.param] * elements)
        yield Collective("all_reduce", "pp", _degree(layout, "pp", TIED), size, 1, "backward", TIED)


def _degree(layout: Layout, axis: str, what: str = "") -> int:
    """Return how many ranks take part in `what` along `axis`."""
    return int(process_group(layout, group_of(axis, what))[0])


def stride_of(layout: Layout, axis: str, what: str = "") -> int:
    """Return the distance in ranks between neighbours of the group that sends `what` along `axis`."""
    return int(process_group(layout, group_of(axis, what))[1])


def group_of(axis: str, what: str = "") -> str:
    """Return the process group (see `kumi.spec.placement`) that sends `what` along `axis`."""
    if what == TIED:
        return "ends"
    dense, experts = GROUPS.get(axis, (axis, axis))
    return experts if what == "experts" else dense


def _priced(job: Job, layout: Layout, one: Collective) -> Collective:
    stride = stride_of(layout, one.axis, one.what)
    arguments = (np.array([float(value)]) for value in (one.bytes, one.degree, stride))
    seconds = one.count * float(collective_seconds(job.cluster, one.kind, *arguments)[0])
    return replace(one, link=link_name(job.cluster, stride, one.degree), seconds=seconds)


def _kind(one: Collective) -> str:
    return "" if one.what in (ALIKE, TIED) else TIME_KIND.get(one.axis, "dp")
