"""The shard of each parameter on a rank, as slices of the global tensor, and the axes along which it is replicated.

    slices(param, layout, rank)         position of the rank's local tensor in the global one, without padding
    replica_axes(param, layout)         axes along which ranks hold the same shard
    tied_axes(model, param, layout)     for a tied embedding, the axis of the first and last stage, which both hold it
    partial_grad_params(model, layout)  parameters with gradients that tp ranks must sum
    partial_expert_params(model, layout) parameters with gradients that expert_tp ranks must sum

Checkpoints, initial weights and the gradient norm use these functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from kumi.spec.layout import Layout
from kumi.spec.ledger import EMBEDDING, ops
from kumi.spec.model import ModelSpec
from kumi.spec.op import Dim, Op, Param
from kumi.spec.process_groups import Axis, axis
from kumi.spec.schedules import V_SHAPED
from kumi.spec.sharding import DIM_TO_AXIS, is_routed, shard_rows, shard_size, tp_style, zero_axis, zero_group


@dataclass(frozen=True)
class Slice:
    """A rectangle of `shape`, at index `start` of the global tensor and index `local` of the rank's tensor."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class RowRun:
    """`count` consecutive rows of a dim, at row `start` of the global tensor and row `local` of the rank's tensor."""

    start: int
    local: int
    count: int


def slices(param: Param, layout: Layout, rank: int) -> tuple[Slice, ...]:
    """Return the slices of `param` on `rank`; empty if no element of `param` is on `rank`.

    There is one slice, or two if `param` consists of two fused matrices that are sharded.
    """
    dims = [_row_runs(dim, *_shard_of(dim, param, layout, rank)) for dim in param.dims]
    if layout.zero > 0 and param.dims:
        routed = is_routed(param)
        # The index of the dim that ZeRO shards: the first one, or for routed experts the one after "experts".
        index = int(routed)
        size = shard_size(param.dims[index], _shard_of(param.dims[index], param, layout, rank)[0])
        ranks = zero_axis(layout, routed=routed)
        rows = shard_rows(size, ranks.degree, ranks.index(rank))
        dims[index] = _between(dims[index], rows.start, rows.start + rows.count)
    rectangles = (
        Slice(tuple(run.start for run in runs), tuple(run.local for run in runs), tuple(run.count for run in runs))
        for runs in product(*dims)
    )
    return tuple(rectangle for rectangle in rectangles if rectangle.numel)


def _shard_of(dim: Dim, param: Param, layout: Layout, rank: int) -> tuple[int, int]:
    """Return the number of shards of `dim` of `param`, and the index of the shard of `rank`."""
    name = DIM_TO_AXIS.get(dim.name, "")
    if name == "tp" and is_routed(param):
        name = "expert_tp"
    if name not in ("tp", "ep", "expert_tp"):
        return 1, 0
    group = axis(layout, name)
    return group.degree, group.index(rank)


def _row_runs(dim: Dim, degree: int, index: int) -> list[RowRun]:
    """Return the rows of shard `index` of `degree` of `dim`, without padding."""
    if degree == 1:
        return [RowRun(0, 0, dim.size)]
    if dim.count < degree and dim.name != "vocab":
        index = index * dim.count // degree  # neighbouring ranks hold the same head
    size = shard_size(dim, degree)
    if is_fused_pair(dim):
        half = size // 2
        return [RowRun(index * half, 0, half), RowRun(dim.size // 2 + index * half, half, half)]
    start = min(index * size, dim.size)
    return [RowRun(start, 0, min(size, dim.size - start))]


def is_fused_pair(dim: Dim) -> bool:
    """True if `dim` has two fused matrices, so that a shard consists of a part of each."""
    return dim.name == "ffn" and dim.unit == 2


def _between(runs: list[RowRun], first: int, last: int) -> list[RowRun]:
    """Return `runs` restricted to the local rows [first, last), renumbered from 0."""
    inside = []
    for run in runs:
        begin, end = max(run.local, first), min(run.local + run.count, last)
        inside.append(RowRun(run.start + begin - run.local, begin - first, max(0, end - begin)))
    return inside


def replica_axes(param: Param, layout: Layout) -> tuple[Axis, ...]:
    """Return the axes along which ranks of a stage hold the same shard of `param`, dp_replicate first."""
    routed = is_routed(param)
    axes = [axis(layout, "dp_replicate")]
    axes += [] if layout.zero else [axis(layout, zero_group(routed=routed))]
    if not routed:
        axes.append(tp_replicas(param, layout))
    elif not any(DIM_TO_AXIS.get(dim.name) == "tp" for dim in param.dims):
        axes.append(axis(layout, "expert_tp"))
    return tuple(group for group in axes if group.degree > 1)


def tied_axes(model: ModelSpec, param: Param, layout: Layout) -> tuple[Axis, ...]:
    """Return the axis of the first and the last pipeline rank if `param` is a tied embedding on both; else ()."""
    # A V-shaped schedule has the first and the last stage on one rank.
    on_two_ranks = layout.pp > 1 and layout.schedule not in V_SHAPED
    if not (on_two_ranks and model.tie_word_embeddings and param.name == EMBEDDING):
        return ()
    return (axis(layout, "ends"),)


def tp_replicas(param: Param, layout: Layout) -> Axis:
    """Return the axis of neighbouring tp ranks that hold the same shard of `param`.

    Its degree is tp if tp shards no dim of `param`, more than 1 if there are fewer key-value heads than tp
    ranks, else 1.
    """
    counts = [dim.count for dim in param.dims if DIM_TO_AXIS.get(dim.name) == "tp" and dim.name != "vocab"]
    if any(DIM_TO_AXIS.get(dim.name) == "tp" and dim.name == "vocab" for dim in param.dims):
        return Axis("tp", 1, 1)
    return Axis("tp", max(1, layout.tp // min(counts)) if counts else layout.tp, 1)


@lru_cache(maxsize=64)
def partial_grad_params(model: ModelSpec, layout: Layout) -> tuple[str, ...]:
    """Return the names of parameters that are replicated over tp ranks with partial gradients, which must be summed.

    Inside of the tensor-parallel blocks, a rank computes the gradient from its own heads. Outside of them, under
    sequence parallelism, it computes the gradient from its own tokens.
    """
    if layout.tp == 1:
        return ()
    return tuple(
        param.name
        for op in ops(model)
        for param in op.params
        if not param.frozen
        and not is_routed(param)
        and tp_replicas(param, layout).degree > 1
        and _sees_part(op, layout)
    )


@lru_cache(maxsize=64)
def partial_expert_params(model: ModelSpec, layout: Layout) -> tuple[str, ...]:
    """Return the names of parameters of routed experts that are replicated over expert_tp with partial gradients.

    expert_tp shards one dim of each matrix. An adapter has one factor without this dim, A or B, which is replicated.
    """
    if layout.expert_tp == 1:
        return ()
    return tuple(
        param.name
        for op in ops(model)
        for param in op.params
        if op.kind == "lora" and is_routed(param) and not any(DIM_TO_AXIS.get(dim.name) == "tp" for dim in param.dims)
    )


def _sees_part(op: Op, layout: Layout) -> bool:
    """True if a tp rank computes `op` on only a part of the tokens or heads."""
    if layout.sequence_parallel or tp_style(op) == "column":
        return True
    if op.kind == "lora":
        # Beside a sharded matrix one factor has only the rank's rows or columns, so the other, which every rank has
        # whole, gets a part of its gradient on each.
        return "tp" in (DIM_TO_AXIS.get(op.source.name), DIM_TO_AXIS.get(op.target.name))
    return op.kind == "norm" and DIM_TO_AXIS.get(op.source.name) == "tp"
