"""Bytes of parameters, gradients and optimizer states on a rank, resident and transient.

All sizes are arrays (rows,), a row for each layout of a `LayoutBatch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kumi.plan.layout_batch import Floats, Ints, LayoutBatch
from kumi.plan.pipeline.stages import RankStages
from kumi.plan.row_cache import RowCache
from kumi.plan.unique_rows import unique_rows
from kumi.spec.job import Job
from kumi.spec.ledger import embedding_ops, head_ops, is_layer_param, unique_layer_ops
from kumi.spec.lora import NF4_BLOCK_BYTES, nf4_blocks
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op, Param
from kumi.spec.optim_states import states_of
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import FsdpUnit, fsdp_units, is_routed, shard_shape, zero_degree
from kumi.spec.techniques import is_tiled


@dataclass(frozen=True)
class ParamShards:
    """Sizes of a set of parameters on a rank after tp and ep sharding, (rows,) each.

    `unsharded`: elements before ZeRO shards them.
    `gathered_bytes`: bytes after an all-gather, in the compute dtype or packed, with padding to equal shards. Packed
        (four-bit quantized) matrices count only under ZeRO-3: other stages do not shard them.
    `shard`: elements of the largest shard.
    `matmul_weights`: elements of weight matrices that are cast for matmuls.
    `optimizer_bytes`: bytes of the shard's optimizer states.
    `trained`, `trained_shard`: `unsharded` and `shard` without frozen parameters.
    `trained_padded`: `trained` rounded up to equal shards on all ranks.
    `frozen_bytes`, `frozen_shard_bytes`: resident bytes of frozen parameters, unsharded and of the shard.
    """

    unsharded: Floats
    gathered_bytes: Floats
    shard: Floats
    matmul_weights: Floats
    optimizer_bytes: Floats
    trained: Floats
    trained_padded: Floats
    trained_shard: Floats
    frozen_bytes: Floats
    frozen_shard_bytes: Floats

    @classmethod
    def zero(cls, rows: int) -> ParamShards:
        """Return the sizes of an empty set of parameters, for `rows` layouts."""
        return cls(*(np.zeros(rows) for _ in fields(cls)))

    def __add__(self, other: ParamShards) -> ParamShards:
        return ParamShards(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def largest(self, other: ParamShards) -> ParamShards:
        """Return the elementwise maximum of the sizes."""
        sizes = (np.maximum(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return ParamShards(*sizes)

    def times(self, count: Floats) -> ParamShards:
        """Return the sizes multiplied by `count`, (rows,)."""
        return ParamShards(*(getattr(self, field.name) * count for field in fields(self)))

    def take(self, index: Ints) -> ParamShards:
        """Return the sizes in the rows `index`."""
        return ParamShards(*(getattr(self, field.name)[index] for field in fields(self)))


class RankParams(NamedTuple):
    """Parameters on a rank, by FSDP unit.

    `total`: all parameters.
    `root`: the root unit, which is gathered first and freed last: the token table and the final norm if tied.
    `layer`: the largest layer, the maximum of each size separately.
    `last`: the last layer, which stays gathered beside the head.
    `embedding`, `head`: the embedding, and the head with the final norm, where they are separate units.
    """

    total: ParamShards
    root: ParamShards
    layer: ParamShards
    last: ParamShards
    embedding: ParamShards
    head: ParamShards

    @property
    def largest_trained(self) -> Floats:
        """Trainable elements in the largest non-root FSDP unit."""
        return self._largest_of("trained")

    @property
    def largest_unsharded(self) -> Floats:
        """Elements in the largest non-root FSDP unit."""
        return self._largest_of("unsharded")

    @property
    def largest_gathered_bytes(self) -> Floats:
        """Bytes of the largest non-root FSDP unit after an all-gather."""
        return self._largest_of("gathered_bytes")

    def _largest_of(self, field: str) -> Floats:
        units = self.layer, self.embedding, self.head
        return np.asarray(np.max([getattr(unit, field) for unit in units], axis=0))


def num_shards(layouts: LayoutBatch, *, routed: bool = False) -> Ints:
    """Return the number of shards of the states, (rows,): of routed experts or of dense parameters; 1 without ZeRO."""
    return np.where(layouts.zero > 0, zero_degree(layouts, routed=routed), 1)


def rank_params(job: Job, layouts: LayoutBatch, share: RankStages, cache: RowCache | None = None) -> RankParams:
    """Return, for every layout, the sizes of the parameters on a rank that holds `share` of the model.

    `cache`: sizes of units of the same job that were computed before.
    """
    zero_kind, shards = _zero_kind(layouts), num_shards(layouts)
    content = [column.astype(np.int64) for column in (*share.layers, *share.last, share.embedding, share.head)]
    first, index = unique_rows(layouts.tp, layouts.ep, layouts.expert_tp, shards, zero_kind, layouts.tiles, *content)
    params = _rank_params(job, layouts.take(first), share.take(first), cache)
    return RankParams(*(part.take(index) for part in params))


def _rank_params(job: Job, layouts: LayoutBatch, share: RankStages, cache: RowCache | None) -> RankParams:
    """Return the result of `rank_params` for distinct rows: no two agree in all columns that it depends on."""
    kinds, end_units = unique_layer_ops(job.model), list(_end_units(job.model, share))
    columns = layouts.tp, layouts.ep, layouts.expert_tp, num_shards(layouts), _zero_kind(layouts), layouts.tiles
    first, index = unique_rows(*columns)
    unique = layouts.take(first)

    def compute(rows: Ints) -> Floats:
        """Return the sizes of every kind of layer and of every unit at the ends, (sizes, rows)."""
        units = [*kinds, *(ops for _, ops, _ in end_units)]
        shards = [param_shards(job, ops, unique.take(rows)) for ops in units]
        return np.stack([getattr(unit, field.name) for unit in shards for field in fields(unit)])

    sizes = compute(np.arange(len(first))) if cache is None else cache.figures([c[first] for c in columns], compute)
    units = [ParamShards(*part[:, index]) for part in sizes.reshape(-1, len(fields(ParamShards)), len(first))]
    layers = units[: len(kinds)]
    gathered_layers = layers
    if (layouts.tiles > 1).any():
        gathered_layers = [param_shards(job, ops, unique, one_tile=True).take(index) for ops in kinds]
    none = ParamShards.zero(len(layouts))
    ends = {"embedding": none, "head": none, "root": none}
    for (name, _, count), unit in zip(end_units, units[len(kinds) :], strict=True):
        name = "root" if name == "head" and job.engine.head_stays else name
        ends[name] = ends[name] + unit.times(count)
    root, embedding, head, largest, last = ends["root"], ends["embedding"], ends["head"], none, none
    total = root + embedding + head
    for layer, gathered, count, is_last in zip(layers, gathered_layers, share.layers, share.last, strict=True):
        total = total + layer.times(count)
        largest = largest.largest(gathered.times(np.minimum(count, 1.0)))
        last = last + gathered.times(is_last)
    return RankParams(total, root, largest, last, embedding, head)


def _zero_kind(layouts: LayoutBatch) -> Ints:
    """Return 0 without ZeRO, 1 for ZeRO-1 and 2, whose parameters have the same sizes, and 2 for ZeRO-3."""
    return np.asarray(np.minimum(layouts.zero, 1) + (layouts.zero == 3))


def _end_units(model: ModelSpec, share: RankStages) -> Iterator[tuple[str, list[Op], Floats]]:
    """Yield the FSDP units of the embedding and the head as (name, operations, 1 in rows that have the unit, else 0).

    A tied table belongs to the root on both end stages, because it stays gathered.
    """
    embedding, head = embedding_ops(model), head_ops(model)
    for unit in fsdp_units((*embedding, *head)):
        first = [op for op in unit.ops if op in embedding]
        last = [op for op in unit.ops if op in head]
        if first and last and model.tie_word_embeddings:
            # The table and the head are one tensor; the last stage has a copy of it.
            yield unit.name, first, np.maximum(share.head, share.embedding)
        elif first:
            yield unit.name, first, share.embedding
        if last:
            yield unit.name, last, share.head


def param_shards(job: Job, ops: Iterable[Op], layouts: LayoutBatch, *, one_tile: bool = False) -> ParamShards:
    """Return the sizes of the parameters of `ops`.

    With `one_tile`, count one tile of the tiled matrices where ZeRO-3 gathers tile by tile.
    """
    total = ParamShards.zero(len(layouts))
    for op in ops:
        for param in op.params:
            # Frozen matrices are stored in the dtype of their matmuls, and need no cast.
            matrix = (
                op.kind in ("linear", "lora") and is_layer_param(param) and len(param.dims) > 1 and not param.frozen
            )
            tiled = matrix and is_tiled(job.model, op)
            # Tiles are cast one at a time, and no cast is kept.
            cast = np.where(layouts.tiles > 1, 0.0, 1.0) if tiled else np.full(len(layouts), float(matrix))
            sizes = _shards_of_param(job, param, layouts, cast)
            if tiled and one_tile:
                sizes = sizes.times(np.where(layouts.zero == 3, 1.0 / layouts.tiles, 1.0))
            total = total + sizes
    return total


def communicated_sizes(job: Job, unit: FsdpUnit, layouts: LayoutBatch) -> tuple[Floats, Floats]:
    """Return the bytes of all parameters of `unit` in an all-gather, and the elements of the trainable parameters in a
    reduction, (rows,) each.

    Both are after tp and ep sharding, rounded up to equal ZeRO shards.
    """
    gathered, trained = np.zeros(len(layouts)), np.zeros(len(layouts))
    for param in unit.params:
        shape, degree = _tp_shape(param, layouts), num_shards(layouts, routed=is_routed(param))
        if param.quantized:
            gathered = gathered + _packed_bytes(prod(shape), layouts).gathered
            continue
        dim = _zero_dim(param)
        shape[dim] = -(-shape[dim] // degree) * degree
        size = prod(shape)
        gathered = gathered + job.itemsize * size
        trained = trained + (0 if param.frozen else size)
    return gathered, trained


class _PackedBytes(NamedTuple):
    """Bytes of a packed matrix: unsharded, of the largest shard, and after an all-gather, (rows,) each."""

    unsharded: Floats
    shard: Floats
    gathered: Floats


def _packed_bytes(numel: Any, layouts: LayoutBatch) -> _PackedBytes:
    """Return the bytes of a packed matrix of `numel` elements, (rows,), on a rank; only ZeRO-3 shards its blocks."""
    blocks, zero3 = nf4_blocks(numel), layouts.zero == 3
    degree = np.where(zero3, num_shards(layouts), 1)
    shard = -(-blocks // degree)
    sizes = (blocks, shard, np.where(zero3, shard * degree, 0))
    return _PackedBytes(*(np.asarray(NF4_BLOCK_BYTES * size, np.float64) for size in sizes))


def _tp_shape(param: Param, layouts: LayoutBatch) -> list[Ints]:
    """Return the shape of `param` on a rank before ZeRO shards it, an array (rows,) for each dim."""
    shape = shard_shape(param, layouts.tp, layouts.ep, layouts.expert_tp)
    return [np.broadcast_to(np.asarray(size), len(layouts)) for size in shape]


def _shards_of_param(job: Job, param: Param, layouts: LayoutBatch, cast: Floats) -> ParamShards:
    """Return the sizes of one parameter; `cast` is 1 where it is a matrix that is cast for matmuls, else 0."""
    degree, none = num_shards(layouts, routed=is_routed(param)), np.zeros(len(layouts))
    unsharded = np.asarray(prod(_tp_shape(param, layouts)), np.float64)
    shard = _shard_numel(param, layouts, degree)
    padded, weights = shard * degree, unsharded * cast
    optimizer = none
    for state in states_of(job.optim, param):
        itemsize = ITEMSIZE[state.dtype or job.precision.param]
        optimizer = optimizer + itemsize * _shard_numel(state.tensor, layouts, degree if state.sharded else 1)
    gathered = job.itemsize * padded
    if not param.frozen:
        return ParamShards(unsharded, gathered, shard, weights, optimizer, unsharded, padded, shard, none, none)
    if param.quantized:
        packed = _packed_bytes(unsharded, layouts)
        return ParamShards(
            unsharded, packed.gathered, shard, weights, none, none, none, none, packed.unsharded, packed.shard
        )
    size = job.precision.itemsize(frozen=True)
    return ParamShards(unsharded, gathered, shard, weights, none, none, none, none, size * unsharded, size * shard)


def _zero_dim(tensor: Param) -> int:
    """Return the dim along which ZeRO shards `tensor`: 0, or for routed experts the dim after "experts"."""
    return 1 if is_routed(tensor) else 0


def _shard_numel(tensor: Param, layouts: LayoutBatch, degree: Ints | int) -> Floats:
    """Return the elements of the largest of `degree` ZeRO shards of `tensor`."""
    shape = _tp_shape(tensor, layouts)
    if shape:
        dim = _zero_dim(tensor)
        shape[dim] = -(-shape[dim] // degree)
    return np.broadcast_to(np.asarray(prod(shape), np.float64), len(layouts))


def _updates_in_compute_dtype(job: Job) -> bool:
    """Return True if there are no master weights: parameters are updated in the dtype of the matmuls."""
    return job.precision.param == job.precision.compute


def resident_state_bytes(job: Job, layouts: LayoutBatch, params: RankParams) -> dict[str, Floats]:
    """Return the resident bytes of "params", "grads" and "optimizer" (master weights included), (rows,) each.

    Without `half_weights`, as in FSDP2, every ZeRO stage shards all three. With it, each stage shards one more.
    """
    total, engine, grads = params.total, job.engine, _reduced_grad_bytes(job, layouts, params.total)
    param, compute = ITEMSIZE[job.precision.param], job.itemsize
    if not engine.half_weights:
        frozen = np.where(layouts.zero > 0, total.frozen_shard_bytes, total.frozen_bytes)
        # Trained parameters have the dtype and the shards of their gradients, so they take as many bytes.
        return {"params": grads + frozen, "grads": grads, "optimizer": total.optimizer_bytes}
    no_masters = _updates_in_compute_dtype(job)
    if engine.half_grads and not no_masters:
        grads = grads + compute * np.where(layouts.zero >= 2, 0.0, total.unsharded)
    masters = 0 if no_masters else param
    return {
        "params": compute * np.where(layouts.zero == 3, total.shard, total.unsharded),
        "grads": grads,
        "optimizer": total.optimizer_bytes + masters * np.where(layouts.zero > 0, total.shard, total.unsharded),
    }


def _reduced_grad_bytes(job: Job, layouts: LayoutBatch, params: ParamShards) -> Floats:
    """Return the bytes of the gradients of `params` after they are reduced over data-parallel ranks, (rows,)."""
    if not job.engine.half_weights:
        trained = np.where(layouts.zero > 0, params.trained_shard, params.trained)
        return np.asarray(ITEMSIZE[job.precision.param] * trained)
    itemsize = job.itemsize if _updates_in_compute_dtype(job) else job.engine.grad_itemsize
    return np.asarray(itemsize * np.where(layouts.zero >= 2, params.shard, params.unsharded))


def tied_grad_bytes(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the bytes of the token table's gradient after it is reduced over data-parallel ranks, (rows,)."""
    table = embedding_ops(job.model)[0].params[0]
    return _reduced_grad_bytes(job, layouts, _shards_of_param(job, table, layouts, np.zeros(len(layouts))))


def update_copy_bytes(job: Job, layouts: LayoutBatch, params: RankParams) -> Floats:
    """Return the bytes of the transient copy of a rank's shard that the optimizer update makes, (rows,)."""
    trained = np.where(layouts.zero > 0, params.total.trained_shard, params.total.trained)
    return np.asarray(job.engine.update_itemsize * trained)


class UnshardedBytes(NamedTuple):
    """Peak bytes of the unsharded copies that ZeRO makes of sharded states for a part of a step, (rows,) each.

    By kind:
    `params`: all-gathered parameters.
    `accumulated`: unsharded gradients that wait for the last microbatch.
    `grads`: unsharded gradients of the current microbatch, before they are reduced.

    By moment, all kinds together with their communication buffers:
    `at_loss`: when the loss is computed.
    `at_layer`: in the backward pass of a layer, while its gradients or those of the head are reduced.
    `at_end`: in the backward pass of the embedding, while the root's gradients are reduced.
    """

    params: Floats
    accumulated: Floats
    grads: Floats
    at_loss: Floats
    at_layer: Floats
    at_end: Floats


def unsharded_bytes(job: Job, layouts: LayoutBatch, params: RankParams, microbatches: Ints) -> UnshardedBytes:
    """Return the bytes of unsharded copies of states on a rank; zero where states are not sharded.

    ZeRO-1 and 2 keep every unit gathered from its first use in a step to its last. ZeRO-3 keeps the root and one other
    unit gathered, and prefetches the next; the last layer is gathered beside the head. Gradients are unsharded for the
    root and one other unit, in the compute dtype. With more than one microbatch, ZeRO-1 also accumulates unsharded
    gradients of all units in the dtype of the reduction. Engines with weights in the compute dtype gather nothing
    below ZeRO-3.
    """
    compute, reduce = job.itemsize, ITEMSIZE[job.precision.reduce]
    root, layer, last, embedding, head = params.root, params.layer, params.last, params.embedding, params.head
    zero3 = layouts.zero == 3
    gathered = params.total.gathered_bytes
    accumulated = reduce * np.where((layouts.zero == 1) & (microbatches > 1), params.total.trained, 0.0)
    # A reduce-scatter reads an unsharded buffer and writes a sharded buffer, both in the dtype of the reduction.
    reduce_buffers = reduce * (1 + 1 / np.maximum(1, num_shards(layouts)))
    one_layer, last_layer = (
        np.where(zero3, root.gathered_bytes + unit.gathered_bytes, gathered) for unit in (layer, last)
    )
    loss = last_layer + np.where(zero3, head.gathered_bytes, 0.0)
    # FSDP keeps two communication buffers until the next collective replaces them: the all-gather buffer of the last
    # unit, unless the head is a unit of its own, whose buffer is freed before the loss; and the input of the last
    # reduce-scatter of the previous microbatch.
    keeps_gather = (zero3 | (microbatches == 1)) & job.engine.head_stays
    keeps_reduce = (layouts.zero >= 2) & (microbatches > 1)
    last_reduced = np.where(
        embedding.trained_padded > 0, embedding.trained_padded, np.maximum(root.trained_padded, layer.trained_padded)
    )
    buffers = np.where(keeps_gather, last.gathered_bytes, 0.0) + reduce * np.where(keeps_reduce, last_reduced, 0.0)
    prefetched = np.where(zero3, layer.gathered_bytes, 0.0)
    in_layer = one_layer + prefetched + compute * (root.trained + layer.trained) + reduce_buffers * layer.trained_padded
    # The input of the head's reduce-scatter stays until that of the last layer. If the gradients are allocated in this
    # pass, there are only the head's then, of all that count as resident in the backward pass of a layer.
    in_head = np.maximum(
        last_layer + compute * head.trained + reduce_buffers * head.trained_padded,
        last_layer + prefetched + compute * (root.trained + last.trained) + reduce * head.trained_padded,
    )
    missing = job.engine.grad_itemsize * (params.total.trained_shard - head.trained_shard)
    in_head = in_head - np.where((microbatches == 1) | (layouts.zero == 1), missing, 0.0)
    end_reduced = np.maximum(root.trained_padded, embedding.trained_padded)
    end_grads = compute * (root.trained + embedding.trained)
    end = np.where(zero3, root.gathered_bytes, gathered) + end_grads + reduce_buffers * end_reduced
    in_use = np.maximum(params.largest_gathered_bytes, last.gathered_bytes + head.gathered_bytes)
    active = (num_shards(layouts) > 1) & (zero3 | (not job.engine.half_weights))
    return UnshardedBytes(
        *(
            np.where(active, size, 0.0)
            for size in (
                np.where(zero3, root.gathered_bytes + in_use, gathered),
                accumulated,
                compute * (root.trained + params.largest_trained),
                loss + accumulated + buffers,
                np.maximum(in_layer, in_head) + accumulated,
                end + accumulated,
            )
        )
    )
