"""The messages of a step, but for gradients and parameters, for columns of layouts.

    layer_messages(rows, ops)    tensor, context and expert parallelism in one layer
    embedding_messages(rows)     where the token table is cut
    head_messages(rows, op)      where the logits are
    stage_message(job, x)        what a pipeline stage sends on
    norm_message(x)              the gradient norm, once a step

The step's seconds are sums of their prices (`kumi.plan.time.layer_costs`); the list of one layout counts them
(`kumi.plan.time.traffic`). Counts are those of one microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kumi.plan.context_traffic import dealt_elements, gradient_itemsize, kv_elements
from kumi.plan.layout_batch import Columns, Floats
from kumi.plan.time.collective_times import collective_seconds
from kumi.plan.time.op_costs import Rows
from kumi.plan.time.tensor_traffic import regions
from kumi.spec.job import Job
from kumi.spec.ledger import Op, logit_chunk
from kumi.spec.process_groups import process_group, splits_gradients
from kumi.spec.sharding import AXIS, style

INT64 = 8.0

# The seconds of a step that messages of a process group count as.
TIME_KIND = {"tp": "tp", "cp": "cp", "ep": "ep", "expert_tp": "ep", "pp": "pp"}


@dataclass(frozen=True)
class Message:
    """One collective of every row: its `kind`, the process group that takes part and the bytes of the whole tensor.

    `counts` says how many there are in each phase of a microbatch: "forward", "backward", "recompute" (where the layer
    is recomputed whole) and "selective" (where it is recomputed in part). `behind` is the computation that hides the
    message: "attention", "products", or "" for none. Where an all-to-all sends every element to several ranks, those
    `copies` that cross a link share it.
    """

    kind: str
    group: str
    bytes: Floats
    counts: dict[str, Any]
    what: str
    behind: str = ""
    copies: int = 1


def message_seconds(job: Job, x: Columns, message: Message) -> Floats:
    """Seconds of one such message in every row."""
    group = process_group(x, message.group)
    return collective_seconds(job.cluster, message.kind, message.bytes, *group, copies=message.copies)


def layer_messages(rows: Rows, ops: Sequence[Op]) -> Iterator[Message]:
    """The messages of a layer with operations `ops`."""
    if (rows.tp > 1).any():
        yield from _regions(rows, ops)
        yield from _adapters(rows, ops)
    for op in ops:
        if op.kind == "attention" and (rows.cp > 1).any():
            yield from _context(rows, op)
        elif op.kind == "dispatch" and (rows.ep * rows.expert_tp > 1).any():
            yield from _experts(rows, op, max(op.experts for op in ops))


def _regions(rows: Rows, ops: Sequence[Op]) -> Iterator[Message]:
    """What enters and leaves the tensor-parallel regions of a layer (see `kumi.plan.time.tensor_traffic`): an
    all-reduce for each forward and backward (Shoeybi et al., 2019); with sequence parallelism their halves, and what
    enters gathered again for the weights' gradients (Korthikanti et al., 2022, section 4.2).

    Selective recomputation keeps what came of messages, but for what a region only reads.
    """
    layer, behind = regions(ops), "products" if rows.engine.overlap_tp else ""
    enter, share, leave = Counter(layer.enter), Counter(layer.share), Counter(layer.leave)
    # What ends a layer gives nothing that its backward pass reads.
    ends = Counter(layer.leave[-1:] if layer.ends and not rows.engine.recompute_whole else ())
    for width in sorted(enter | share | leave):
        entering, leaving, again = enter[width] + share[width], leave[width], leave[width] - ends[width]
        yield from _halves(
            rows,
            width,
            {"forward": entering, "recompute": entering, "backward": leaving, "selective": share[width]},
            {"forward": leaving, "recompute": again, "backward": entering},
            behind=behind,
        )
        if rows.job.model.lora is None:
            yield _inputs(rows, width, enter[width], behind)
    if layer.norms:
        counts = dict.fromkeys(("forward", "backward", "recompute"), layer.norms)
        yield Message("all_reduce", "tp", rows.wide * rows.tokens, counts, "norms", behind)


def _halves(
    rows: Rows,
    width: float,
    gathers: dict[str, int],
    scatters: dict[str, int],
    what: str = "activations",
    behind: str = "",
) -> Iterator[Message]:
    """`width` elements of every token: gathered and scattered under sequence parallelism, else all-reduced where they
    would be scattered."""
    size, parallel = rows.tokens * rows.size * width, rows.parallel
    yield Message("all_gather", "tp", size, _where(parallel, gathers), what, behind)
    yield Message("reduce_scatter", "tp", size, _where(parallel, scatters), what, behind)
    yield Message("all_reduce", "tp", size, _where(~parallel, scatters), what, behind)


def _inputs(rows: Rows, width: float, count: int, behind: str = "") -> Message:
    """What enters, gathered again for the gradients of the weights."""
    size = rows.tokens * rows.size * width
    return Message(
        "all_gather", "tp", size, _where(rows.parallel, {"backward": count}), "inputs of weight gradients", behind
    )


def _where(rows: Any, counts: dict[str, int]) -> dict[str, Any]:
    return {phase: rows * count for phase, count in counts.items() if count}


def _adapters(rows: Rows, ops: Sequence[Op]) -> Iterator[Message]:
    """What adapters beside matrices cut by columns make of the tokens between regions, gathered once for all that read
    the same input: thin. And, for DoRA, squares of rows of which each rank has some columns."""
    for op in ops:
        if op.kind == "lora" and len(op.params) > 2 and AXIS.get(op.source.name) == "tp":
            squares = np.full_like(rows.tp, rows.wide * op.target.size)
            counts = {"forward": 1, "recompute": 1}
            yield Message("all_reduce", "tp", squares, counts, "norms of adapted matrices")
    ranks, widths = {op.name.removesuffix(".lora"): op.rank for op in ops if op.kind == "lora"}, list[int]()
    before = None
    for op in ops if ranks else ():
        if style(op) == "column" and op.kind == "linear":
            if before is None or before.source != op.source:
                widths.append(0)
            widths[-1] += ranks.get(op.name, 0)
        before = op if style(op) == "column" else None
    for width, count in Counter(widths).items():
        size = rows.tokens * rows.size * width
        gathers, scatters = {"forward": count, "recompute": count}, {"backward": count}
        yield Message("all_gather", "tp", size, _where(rows.parallel, gathers), "adapters")
        yield Message("reduce_scatter", "tp", size, _where(rows.parallel, scatters), "adapters")


def _context(rows: Rows, op: Op) -> Iterator[Message]:
    """Keys and values go round the ring, in the backward with their gradients, or heads are dealt out (see
    `kumi.plan.context_traffic`)."""
    if not rows.ulysses.all():
        hops = np.where(rows.ulysses, 0.0, rows.cp - 1)
        elements = rows.tokens * kv_elements(op, rows.tp)
        every = dict.fromkeys(("forward", "backward", "recompute"), hops)
        yield Message("send", "cp", rows.size * elements, every, "keys and values", "attention")
        size = gradient_itemsize(rows.job) * elements
        yield Message("send", "cp", size, {"backward": hops}, "gradients of keys and values", "attention")
    if rows.ulysses.any():
        sizes = dealt_elements(op, rows.tp, rows.cp)
        for elements, what in zip(sizes, ("queries, keys and values", "results"), strict=True):
            size = rows.tokens * rows.size * elements
            counts = _where(rows.ulysses, {"forward": 1, "recompute": 1})
            yield Message("all_to_all", "cp", size, counts, what)
            yield Message("all_to_all", "cp", size, _where(rows.ulysses, {"backward": 1}), f"gradients of {what}")


def _experts(rows: Rows, op: Op, experts: int) -> Iterator[Message]:
    """Tokens go to their experts and come back: an all-to-all among the ranks that share `experts`, after word of how
    many come.

    Ranks that have parts of the same experts gather each other's tokens, choices and weights before, and divide the
    sums after; backward the reverse, without the choices.
    """
    tokens, parts = rows.tokens / np.where(rows.parallel, rows.tp, 1.0), rows.expert_tp
    hidden = rows.size * tokens * rows.job.model.hidden_size * parts
    copies = round(op.passes) if rows.engine.tokens_once else 1
    sent = hidden * op.passes
    yield Message("all_to_all", "ep", sent, {"forward": 2, "recompute": 2}, "tokens", copies=copies)
    yield Message("all_to_all", "ep", sent, {"backward": 2}, "gradients of tokens", copies=copies)
    there = {"forward": 1, "recompute": 1}
    yield Message("all_to_all", "ep", np.full_like(rows.tp, INT64 * experts), there, "counts")
    if (parts == 1).all():
        return
    each = tokens * parts * op.passes
    yield Message("all_gather", "expert_tp", hidden, there, "tokens")
    yield Message("all_gather", "expert_tp", each * rows.wide, there, "weights")
    yield Message("all_gather", "expert_tp", each * INT64, there, "choices")
    yield Message("reduce_scatter", "expert_tp", hidden, {"forward": 1}, "sums")
    yield Message("reduce_scatter", "expert_tp", hidden, {"backward": 1}, "tokens")
    yield Message("reduce_scatter", "expert_tp", each * rows.wide, {"backward": 1}, "weights")
    yield Message("all_gather", "expert_tp", hidden, {"backward": 1}, "sums")


def embedding_messages(rows: Rows, width: int) -> Iterator[Message]:
    """Rows of `width` elements that each rank finds of some tokens only are summed."""
    if (rows.tp > 1).any():
        trained = rows.job.model.lora is None
        yield from _halves(rows, width, {"backward": int(trained)}, {"forward": 1}, "embedding")


def head_messages(rows: Rows, op: Op) -> Iterator[Message]:
    """The head forms its gradient at once, and sends two numbers a token besides, in messages of as many tokens as
    logits are formed of at a time."""
    if not (rows.tp > 1).any():
        return
    yield from _halves(rows, op.source.size, {"forward": 1}, {"backward": 1}, "head")
    if rows.engine.recompute_whole:
        yield _inputs(rows, op.source.size, 1)
    columns = np.ceil(op.target.size / rows.tp).astype(np.int64)
    chunk = np.minimum(np.vectorize(logit_chunk)(columns, rows.device.kind), rows.tokens)
    each, whole = 2.0 * rows.tp * rows.wide, np.floor(rows.tokens / chunk)
    yield Message("all_gather", "tp", each * chunk, {"forward": whole}, "log-probs")
    yield Message("all_gather", "tp", each * (rows.tokens - whole * chunk), {"forward": 1}, "log-probs")


def stage_message(job: Job, x: Columns) -> Message:
    """The activations of one microbatch that a pipeline stage sends on, or their gradients on the way back."""
    tokens = x.microbatch * job.batch.seq_len / x.cp
    parts = np.where(x.sequence_parallel.astype(bool) | job.engine.scatter_sends, x.tp, 1)
    size = job.itemsize * tokens * job.model.hidden_size / parts
    counts = {"forward": 1, "backward": 1}
    return Message("send", "pp", np.where(x.pp > 1, size, 0.0), counts, "activations")


def norm_message(x: Columns) -> Message:
    """The square of each rank's part of the gradient's norm, one float32; nothing where ranks have the same part."""
    return Message("all_reduce", "norm", 4.0 * splits_gradients(x), {"update": 1}, "norm")
