"""The collectives of a step, except for parameters and gradients, for a batch of layouts.

    layer_collectives(sizes, ops)   tensor, context and expert parallelism in one layer
    embedding_collectives(sizes)    the vocab-parallel embedding
    head_collectives(sizes, op)     the vocab-parallel head
    stage_transfer(job, layouts)    activations between pipeline stages
    norm_all_reduce(layouts)        the gradient norm, once a step

`kumi.plan.time.layer_costs` sums their seconds for the step time; `kumi.plan.time.traffic` lists them for one layout.
Counts are per microbatch, but for the gradient norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kumi.plan.context_traffic import kv_elements, kv_grad_itemsize, ulysses_elements
from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.plan.time.collective_times import collective_seconds
from kumi.plan.time.op_costs import LayoutSizes
from kumi.plan.time.tensor_traffic import tensor_traffic
from kumi.spec.job import Job
from kumi.spec.ledger import Op, embedding_ops, logit_chunk
from kumi.spec.process_groups import has_sharded_grads, process_group
from kumi.spec.sharding import DIM_TO_AXIS, tp_style

_INT64_BYTES = 8.0

# The kind of step time that the collectives of a process group count as.
TIME_KIND = {"tp": "tp", "cp": "cp", "ep": "ep", "expert_tp": "ep", "pp": "pp"}


class CollectiveBatch(NamedTuple):
    """One collective in a batch of layouts.

    `kind`, `what`: as in `kumi.plan.estimates.Collective`.
    `group`: name of its process group (see `kumi.spec.process_groups`).
    `bytes`: size of the unsharded tensor; for all_to_all and send, the bytes that one rank sends, (rows,).
    `counts`: occurrences in a microbatch by phase: "forward", "backward", "recompute" (with full recomputation) and
        "selective" (with selective recomputation); or in a step: "update". A number or (rows,).
    `hidden_by`: the computation that can hide it: "attention", "matmuls" or "".
    `copies`: ranks that an all_to_all sends each element to; ranks behind the same link share one transfer.
    """

    kind: str
    group: str
    bytes: Floats
    counts: dict[str, Any]
    what: str
    hidden_by: str = ""
    copies: int = 1


def seconds_each(job: Job, layouts: LayoutBatch, collective: CollectiveBatch) -> Floats:
    """Return the seconds of one occurrence of `collective`, (rows,)."""
    group = process_group(layouts, collective.group)
    return collective_seconds(job.cluster, collective.kind, collective.bytes, *group, copies=collective.copies)


def layer_collectives(sizes: LayoutSizes, ops: Sequence[Op]) -> Iterator[CollectiveBatch]:
    """Yield the collectives of a layer with operations `ops`."""
    if (sizes.tp > 1).any():
        yield from _tensor_parallel(sizes, ops)
        yield from _adapters(sizes, ops)
    for op in ops:
        if op.kind == "attention" and (sizes.cp > 1).any():
            yield from _context_parallel(sizes, op)
        elif op.kind == "dispatch" and (sizes.ep * sizes.expert_tp > 1).any():
            yield from _expert_parallel(sizes, op, max(op.experts for op in ops))


def _tensor_parallel(sizes: LayoutSizes, ops: Sequence[Op]) -> Iterator[CollectiveBatch]:
    """Yield the tensor-parallel collectives of a layer (see `kumi.plan.time.tensor_traffic`).

    Attention and MLP each have an all-reduce in the forward and one in the backward pass (Shoeybi et al., 2019). With
    sequence parallelism they are split into reduce-scatter and all-gather, and inputs are gathered a second time for
    the weight gradients (Korthikanti et al., 2022, section 4.2). Selective recomputation saves the results of
    collectives except for `shared_inputs`.
    """
    layer, hidden_by = tensor_traffic(ops), "matmuls" if sizes.engine.overlap_tp else ""
    inputs, shared = Counter(layer.column_inputs), Counter(layer.shared_inputs)
    outputs = Counter(layer.row_outputs)
    # The backward pass does not read the output of a layer's last matrix.
    skip_last = layer.ends_with_row and not sizes.engine.recompute_whole
    not_recomputed = Counter(layer.row_outputs[-1:] if skip_last else ())
    for width in sorted(inputs | shared | outputs):
        gathers, scatters = inputs[width] + shared[width], outputs[width]
        yield from _gather_scatter_pair(
            sizes,
            width,
            {"forward": gathers, "recompute": gathers, "backward": scatters, "selective": shared[width]},
            {"forward": scatters, "recompute": scatters - not_recomputed[width], "backward": gathers},
            hidden_by=hidden_by,
        )
        if sizes.job.model.lora is None:
            yield _inputs_of_weight_gradients(sizes, width, inputs[width], hidden_by)
    if layer.norms:
        counts = dict.fromkeys(("forward", "backward", "recompute"), layer.norms)
        yield CollectiveBatch("all_reduce", "tp", sizes.wide_itemsize * sizes.tokens, counts, "norms", hidden_by)


def _gather_scatter_pair(
    sizes: LayoutSizes,
    width: float,
    gathers: dict[str, int],
    scatters: dict[str, int],
    what: str = "activations",
    hidden_by: str = "",
) -> Iterator[CollectiveBatch]:
    """Yield the collectives of activations of `width` elements per token.

    With sequence parallelism these are `gathers` all-gathers and `scatters` reduce-scatters by phase, else `scatters`
    all-reduces.
    """
    size, parallel = sizes.tokens * sizes.itemsize * width, sizes.sequence_parallel
    yield CollectiveBatch("all_gather", "tp", size, _counts_where(parallel, gathers), what, hidden_by)
    yield CollectiveBatch("reduce_scatter", "tp", size, _counts_where(parallel, scatters), what, hidden_by)
    yield CollectiveBatch("all_reduce", "tp", size, _counts_where(~parallel, scatters), what, hidden_by)


def _inputs_of_weight_gradients(sizes: LayoutSizes, width: float, count: int, hidden_by: str = "") -> CollectiveBatch:
    """Return the all-gathers of inputs for the weight gradients under sequence parallelism."""
    size = sizes.tokens * sizes.itemsize * width
    counts = _counts_where(sizes.sequence_parallel, {"backward": count})
    return CollectiveBatch("all_gather", "tp", size, counts, "inputs of weight gradients", hidden_by)


def _counts_where(rows: Any, counts: dict[str, int]) -> dict[str, Any]:
    """Return the counts by phase that are not 0, as arrays that are 0 outside the mask `rows`."""
    return {phase: rows * count for phase, count in counts.items() if count}


def _adapters(sizes: LayoutSizes, ops: Sequence[Op]) -> Iterator[CollectiveBatch]:
    """Yield the collectives of adapters.

    Beside column-parallel matrices, the low-rank activations are gathered once for all adapters with the same input.
    DoRA also all-reduces the squared row norms of matrices with sharded columns.
    """
    for op in ops:
        if op.kind == "lora" and len(op.params) > 2 and DIM_TO_AXIS.get(op.source.name) == "tp":
            squares = np.full_like(sizes.tp, sizes.wide_itemsize * op.target.size)
            counts = {"forward": 1, "recompute": 1}
            yield CollectiveBatch("all_reduce", "tp", squares, counts, "norms of adapted matrices")
    lora_ranks, widths = (
        {op.name.removesuffix(".lora"): op.rank for op in ops if op.kind == "lora" and not op.experts},
        list[int](),
    )
    before = None
    for op in ops if lora_ranks else ():
        if tp_style(op) == "column" and op.kind == "linear":
            if before is None or before.source != op.source:
                widths.append(0)
            widths[-1] += lora_ranks.get(op.name, 0)
        before = op if tp_style(op) == "column" else None
    for width, count in Counter(widths).items():
        size = sizes.tokens * sizes.itemsize * width
        gathers, scatters = {"forward": count, "recompute": count, "selective": count}, {"backward": count}
        parallel = sizes.sequence_parallel
        yield CollectiveBatch("all_gather", "tp", size, _counts_where(parallel, gathers), "adapters")
        yield CollectiveBatch("reduce_scatter", "tp", size, _counts_where(parallel, scatters), "adapters")


def _context_parallel(sizes: LayoutSizes, op: Op) -> Iterator[CollectiveBatch]:
    """Yield the collectives of ring attention or Ulysses (see `kumi.plan.context_traffic`)."""
    if not sizes.ulysses.all():
        hops = np.where(sizes.ulysses, 0.0, sizes.cp - 1)
        elements = sizes.tokens * kv_elements(op, sizes.tp)
        counts = dict.fromkeys(("forward", "backward", "recompute"), hops)
        yield CollectiveBatch("send", "cp", sizes.itemsize * elements, counts, "keys and values", "attention")
        size = kv_grad_itemsize(sizes.job) * elements
        yield CollectiveBatch("send", "cp", size, {"backward": hops}, "gradients of keys and values", "attention")
    if sizes.ulysses.any():
        both = ulysses_elements(op, sizes.tp, sizes.cp)
        for elements, what in zip(both, ("queries, keys and values", "results"), strict=True):
            size = sizes.tokens * sizes.itemsize * elements
            forward = _counts_where(sizes.ulysses, {"forward": 1, "recompute": 1})
            backward = _counts_where(sizes.ulysses, {"backward": 1})
            yield CollectiveBatch("all_to_all", "cp", size, forward, what)
            yield CollectiveBatch("all_to_all", "cp", size, backward, f"gradients of {what}")


def _expert_parallel(sizes: LayoutSizes, op: Op, experts: int) -> Iterator[CollectiveBatch]:
    """Yield the collectives that dispatch tokens to `experts` experts and combine the results.

    Tokens take an all-to-all over ep each way, and their numbers take one. Ranks that shard experts along expert_tp
    also all-gather each other's tokens, choices and weights before, and reduce-scatter the results after; the backward
    pass does the reverse, without the choices.
    """
    tokens = sizes.tokens / np.where(sizes.sequence_parallel, sizes.tp, 1.0)
    hidden = sizes.itemsize * tokens * sizes.job.model.hidden_size * sizes.expert_tp
    copies = round(op.passes) if sizes.engine.tokens_once else 1
    sent = hidden * op.passes
    yield CollectiveBatch("all_to_all", "ep", sent, {"forward": 2, "recompute": 2}, "tokens", copies=copies)
    yield CollectiveBatch("all_to_all", "ep", sent, {"backward": 2}, "gradients of tokens", copies=copies)
    forward, backward = {"forward": 1, "recompute": 1}, {"backward": 1}
    yield CollectiveBatch("all_to_all", "ep", np.full_like(sizes.tp, _INT64_BYTES * experts), forward, "counts")
    if (sizes.expert_tp == 1).all():
        return
    routed = tokens * sizes.expert_tp * op.passes
    yield CollectiveBatch("all_gather", "expert_tp", hidden, forward, "tokens")
    yield CollectiveBatch("all_gather", "expert_tp", routed * sizes.wide_itemsize, forward, "weights")
    yield CollectiveBatch("all_gather", "expert_tp", routed * _INT64_BYTES, forward, "choices")
    yield CollectiveBatch("reduce_scatter", "expert_tp", hidden, {"forward": 1}, "sums")
    yield CollectiveBatch("reduce_scatter", "expert_tp", hidden, backward, "tokens")
    yield CollectiveBatch("reduce_scatter", "expert_tp", routed * sizes.wide_itemsize, backward, "weights")
    yield CollectiveBatch("all_gather", "expert_tp", hidden, backward, "sums")


def embedding_collectives(sizes: LayoutSizes, width: int) -> Iterator[CollectiveBatch]:
    """Yield the collectives of a vocab-parallel embedding with `width` elements per token.

    Each rank looks up the tokens in its part of the vocabulary; the results are summed over tp.
    """
    if (sizes.tp > 1).any():
        trained = not embedding_ops(sizes.job.model)[0].frozen
        yield from _gather_scatter_pair(sizes, width, {"backward": int(trained)}, {"forward": 1}, "embedding")


def head_collectives(sizes: LayoutSizes, op: Op) -> Iterator[CollectiveBatch]:
    """Yield the collectives of the head. The log-prob head forms its gradient in the forward pass.

    The loss also all-gathers two numbers per token, in one message for each chunk of tokens. A score head is
    replicated; under sequence parallelism the scores of all tokens are all-gathered.
    """
    if not (sizes.tp > 1).any():
        return
    if op.kind == "score":
        counts = _counts_where(sizes.sequence_parallel, {"forward": 1})
        yield CollectiveBatch("all_gather", "tp", sizes.wide_itemsize * sizes.tokens, counts, "scores")
        return
    yield from _gather_scatter_pair(sizes, op.source.size, {"forward": 1}, {"backward": 1}, "head")
    if sizes.engine.recompute_whole:
        yield _inputs_of_weight_gradients(sizes, op.source.size, 1)
    columns = np.ceil(op.target.size / sizes.tp).astype(np.int64)
    chunk = np.minimum(np.vectorize(logit_chunk)(columns, sizes.device.kind), sizes.tokens)
    per_token, chunks = 2.0 * sizes.tp * sizes.wide_itemsize, np.floor(sizes.tokens / chunk)
    remainder = sizes.tokens - chunks * chunk
    yield CollectiveBatch("all_gather", "tp", per_token * chunk, {"forward": chunks}, "log-probs")
    yield CollectiveBatch("all_gather", "tp", per_token * remainder, {"forward": 1}, "log-probs")


def stage_transfer(job: Job, layouts: LayoutBatch) -> CollectiveBatch:
    """Return the send of one microbatch's activations to the next pipeline stage, or of their gradients back."""
    tokens = layouts.microbatch * job.batch.seq_len / layouts.cp
    shards = np.where(layouts.sequence_parallel.astype(bool) | job.engine.scatter_sends, layouts.tp, 1)
    size = job.itemsize * tokens * job.model.hidden_size / shards
    counts = {"forward": 1, "backward": 1}
    return CollectiveBatch("send", "pp", np.where(layouts.pp > 1, size, 0.0), counts, "activations")


def norm_all_reduce(layouts: LayoutBatch) -> CollectiveBatch:
    """Return the all-reduce of the squared gradient norm, one float32; 0 bytes where ranks have equal gradients."""
    return CollectiveBatch("all_reduce", "norm", 4.0 * has_sharded_grads(layouts), {"update": 1}, "norm")
