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
from kumi.plan.types import Collective
from kumi.plan.update import NORM_BYTES, norm_group
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.ledger import Op, embedding_ops, head_ops, layer_ops
from kumi.spec.schedule import placement

# Which kind of seconds of a step an axis' traffic is counted as.
EXCHANGES = ("dispatch", "combine")
TIME_KIND = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp"}


def traffic(job: Job, layout: Layout, exposed: dict[str, float], pp_rank: int = 0) -> tuple[Collective, ...]:
    """The collectives of a rank of pipeline rank `pp_rank`; what is `exposed` of each kind of seconds is dealt out to
    them by how long they take."""
    priced = [_priced(job, layout, one) for one in collectives(job, layout, pp_rank)]
    totals: dict[str, float] = {}
    for one in priced:
        totals[_kind(one)] = totals.get(_kind(one), 0.0) + one.seconds
    return tuple(
        replace(one, exposed=one.seconds * min(1.0, exposed.get(_kind(one), 0.0) / totals[_kind(one)]))
        if totals[_kind(one)] else one
        for one in priced
    )  # fmt: skip


def collectives(job: Job, layout: Layout, pp_rank: int = 0) -> tuple[Collective, ...]:
    """What a rank of pipeline rank `pp_rank` sends in a step, not priced: the same message is listed once, with how
    often it is sent."""
    own = _Own(job, layout, pp_rank)
    counts: dict[Collective, int] = {}
    for one in (*_data(own), *_tensor(own), *_context(own), *_expert(own), *_pipeline(own)):
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
        self.hidden = self.size * self.tokens * job.model.hidden_size
        self.sequence_parallel = layout.sequence_parallel and layout.tp > 1

    @cached_property
    def units(self) -> list[tuple[str, tuple[Op, ...]]]:
        """What is gathered and reduced as one: the embedding, each layer, and the root (see `spec.sharding.units`)."""
        model = self.job.model
        found = [("layer", layer_ops(model, index)) for index in self.layers]
        embedding = embedding_ops(model) if self.first else ()
        head = head_ops(model) if self.last else ()
        if model.tie_word_embeddings and embedding and head:
            return [*found, ("root", (*embedding, *head))]
        return [*([("embedding", embedding)] if embedding else []), *found, *([("root", head)] if head else [])]


def _data(own: _Own) -> Iterator[Collective]:
    """Gradients and parameters over the data axes, unit by unit; plain data parallelism reduces all at once."""
    job, layout, times = own.job, own.layout, own.microbatches
    reduced, whole = float(job.engine.grad_reduce_itemsize), float(job.itemsize)
    different = {id(ops): ops for _, ops in own.units}
    sizes = {key: _sizes(job, layout, ops) for key, ops in different.items()}
    units = [(name, sizes[id(ops)]) for name, ops in own.units]
    shards = layout.dp_shard * layout.cp
    experts = max(1, shards * layout.tp // (layout.ep * layout.expert_tp))
    if layout.zero == 0:
        for part, degree, what in ((0, shards, "gradients"), (1, experts, "experts")):
            size = reduced * sum(unit[part] for _, unit in units)
            yield Collective("all_reduce", "dp", layout.dp_replicate * degree, size, 1, "backward", what)
        yield _norm(layout)
        return
    last_layer = max((number for number, unit in enumerate(units) if unit[0] == "layer"), default=-1)
    every, gathered = Counter(units), Counter[tuple[str, tuple[float, float]]]()
    for number, unit in enumerate(units):
        again = unit[0] == "layer" and number != last_layer
        gathered[unit] += times * (1 + again) if layout.zero == 3 else 1
    when = "forward+backward" if layout.zero == 3 else "forward"
    for (name, (dense, expert)), count in every.items():
        gathers, reduces = gathered[name, (dense, expert)], count if layout.zero == 1 else count * times
        for size, degree, what in ((dense, shards, name), (expert, experts, "experts")):
            yield Collective("all_gather", "dp_shard", degree, whole * size, gathers, when, what)
            yield Collective("reduce_scatter", "dp_shard", degree, reduced * size, reduces, "backward", what)
            share = reduced * size / degree
            yield Collective("all_reduce", "dp_replicate", layout.dp_replicate, share, count, "backward", what)
    yield _norm(layout)


def _norm(layout: Layout) -> Collective:
    degree, _ = norm_group(columns([layout]))
    return Collective("all_reduce", "world", int(degree[0]), NORM_BYTES, 1, "update", "norm")


def _sizes(job: Job, layout: Layout, ops: Sequence[Op]) -> tuple[float, float]:
    """Elements of the dense parameters of `ops` and of those of routed experts as they travel: cut by tp and ep, and
    padded so that all ranks that divide them have equally many."""
    x = columns([layout])
    dense, routed = ([op for op in ops if bool(op.experts) == routed] for routed in (False, True))
    return float(elements(job, dense, x).padded[0]), float(elements(job, routed, x).padded[0])


def _tensor(own: _Own) -> Iterator[Collective]:
    """Around the attention and the feed-forward of every layer; under SP each all-reduce is cut into its halves."""
    layout, times = own.layout, own.microbatches * len(own.layers)
    recomputed = own.microbatches * _recomputed_layers(own) if layout.recompute == "full" else 0
    if not own.sequence_parallel:
        yield Collective("all_reduce", "tp", layout.tp, own.hidden, 2 * times, "forward", "activations")
        yield Collective("all_reduce", "tp", layout.tp, own.hidden, 2 * times, "backward", "activations")
        yield Collective("all_reduce", "tp", layout.tp, own.hidden, 2 * recomputed, "recompute", "activations")
    else:
        for kind in ("all_gather", "reduce_scatter"):
            yield Collective(kind, "tp", layout.tp, own.hidden, 2 * times, "forward", "activations")
            yield Collective(kind, "tp", layout.tp, own.hidden, 2 * times, "backward", "activations")
            yield Collective(kind, "tp", layout.tp, own.hidden, 2 * recomputed, "recompute", "activations")
        yield Collective("all_gather", "tp", layout.tp, own.hidden, 2 * times, "backward", "inputs of weight gradients")
    first, last = own.microbatches * own.first, own.microbatches * own.last
    if not own.sequence_parallel:
        yield Collective("all_reduce", "tp", layout.tp, own.hidden, first, "forward", "embedding")
        yield Collective("all_reduce", "tp", layout.tp, own.hidden, last, "backward", "head")
        return
    yield Collective("reduce_scatter", "tp", layout.tp, own.hidden, first, "forward", "embedding")
    yield Collective("all_gather", "tp", layout.tp, own.hidden, first, "backward", "embedding")
    yield Collective("all_gather", "tp", layout.tp, own.hidden, last, "forward", "head")
    yield Collective("reduce_scatter", "tp", layout.tp, own.hidden, last, "backward", "head")
    yield Collective("all_gather", "tp", layout.tp, own.hidden, last, "backward", "inputs of weight gradients")


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
    """Tokens go to their experts and come back, in every layer of experts."""
    layout = own.layout
    layers = Counter(own.layers)
    routed = {layer: [op for op in layer_ops(own.job.model, layer) if op.kind in EXCHANGES] for layer in layers}
    if not any(routed.values()):
        return
    passes = next(ops[0].passes for ops in routed.values() if ops)
    size = own.hidden * passes / (layout.tp if own.sequence_parallel else 1)
    count = sum(layers[layer] * len(ops) for layer, ops in routed.items()) * own.microbatches
    yield Collective("all_to_all", "ep", layout.ep, size, count, "forward", "tokens")
    yield Collective("all_to_all", "ep", layout.ep, size, count, "backward", "gradients of tokens")
    if layout.recompute == "full":
        again = round(count * _recomputed_layers(own) / max(1, len(own.layers)))
        yield Collective("all_to_all", "ep", layout.ep, size, again, "recompute", "tokens")


def _pipeline(own: _Own) -> Iterator[Collective]:
    """Activations to the next stage and their gradients back, for every stage but the last and the first."""
    size = own.hidden / (own.layout.tp if own.sequence_parallel else 1)
    chunks, last = own.chunks, own.layout.pp * own.layout.stages - 1
    forward, backward = (sum(chunk != end for chunk in chunks) for end in (last, 0))
    yield Collective("send", "pp", own.layout.pp, size, own.microbatches * forward, "forward", "activations")
    yield Collective("send", "pp", own.layout.pp, size, own.microbatches * backward, "backward", "gradients")


def stride_of(layout: Layout, axis: str, what: str = "") -> int:
    """Distance in ranks between neighbours of a group along `axis`: data groups take the cp ranks in, experts borrow
    theirs."""
    if axis in ("dp", "dp_shard"):
        return layout.ep * layout.expert_tp if what == "experts" else layout.tp
    if axis == "world":
        return int(norm_group(columns([layout]))[1][0])
    return layout.expert_tp if axis == "ep" else layout.stride(axis)


def _priced(job: Job, layout: Layout, one: Collective) -> Collective:
    stride = stride_of(layout, one.axis, one.what)
    arguments = (np.array([float(value)]) for value in (one.bytes, one.degree, stride))
    seconds = one.count * float(collective_seconds(job.cluster, one.kind, *arguments)[0])
    return replace(one, link=link_name(job.cluster, stride, one.degree), seconds=seconds)


def _kind(one: Collective) -> str:
    return TIME_KIND.get(one.axis, "dp")
