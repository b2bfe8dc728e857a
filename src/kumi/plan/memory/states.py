"""Parameters, gradients and optimizer states on a rank, and what dividing them costs in passing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import prod

import numpy as np

from kumi.plan.layout_batch import Columns, Floats, Ints
from kumi.plan.pipeline.stages import Share
from kumi.plan.unique_rows import distinct
from kumi.spec.job import Job
from kumi.spec.ledger import embedding_ops, head_ops, is_hidden, kind_ops
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op, Param
from kumi.spec.optim_states import states_of
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import Unit, cut_shape, is_routed, units, zero_degree
from kumi.spec.techniques import is_tiled


@dataclass(frozen=True)
class Elements:
    """Of some parameters on a rank, (rows,) each: elements before ZeRO divides them, padded so that all its ranks have
    equally many, of the largest part, and of matrices that layers multiply with; bytes of the part's optimizer state.
    `trained` and so on are those of what is trained: all but what stands frozen beside adapters. `frozen` and
    `frozen_part` are bytes of what is not, at rest.
    """

    whole: Floats
    padded: Floats
    part: Floats
    products: Floats
    states: Floats
    trained: Floats
    trained_padded: Floats
    trained_part: Floats
    frozen: Floats
    frozen_part: Floats

    def __add__(self, other: Elements) -> Elements:
        return Elements(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def largest(self, other: Elements) -> Elements:
        return Elements(*(np.maximum(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)))

    def times(self, count: Floats) -> Elements:
        return Elements(*(getattr(self, field.name) * count for field in fields(self)))

    def take(self, index: Ints) -> Elements:
        return Elements(*(getattr(self, field.name)[index] for field in fields(self)))


@dataclass(frozen=True)
class Held:
    """What a rank holds: `total` of all its parameters; `root`, the head with the final norm (and with the token table,
    where they share it), which is gathered first and freed last; the largest `layer`, by each figure for itself; and
    the embedding, if it is a unit of its own."""

    total: Elements
    root: Elements
    layer: Elements
    embedding: Elements

    @property
    def largest_trained(self) -> Floats:
        """Of the units besides the root, elements that are trained of the one that has most."""
        return np.maximum(self.layer.trained, self.embedding.trained)

    @property
    def largest_whole(self) -> Floats:
        """Elements of the largest unit besides the root."""
        return np.maximum(self.layer.whole, self.embedding.whole)

    @property
    def largest_padded(self) -> Floats:
        return np.maximum(self.layer.padded, self.embedding.padded)


def divided(x: Columns, *, routed: bool = False) -> Ints:
    """How many ranks divide dense states, or those of routed experts, among them; 1 where nothing is divided."""
    return np.where(x.zero > 0, zero_degree(x, routed=routed), 1)


def held(job: Job, x: Columns, share: Share) -> Held:
    """The parameters that `share` of the model has on a rank of every row."""
    first, index = distinct(x.tp, x.ep, x.expert_tp, divided(x), np.minimum(x.zero, 1) + (x.zero == 3), x.tiles)
    rows, kinds = x.take(first), kind_ops(job.model)
    layers = [elements(job, ops, rows).take(index) for ops in kinds]
    at_once = layers
    if (x.tiles > 1).any():
        at_once = [elements(job, ops, rows, at_once=True).take(index) for ops in kinds]
    none = Elements(*(np.zeros(len(x)) for _ in fields(Elements)))
    ends = {"embedding": none, "root": none}
    for name, ops, count in _ends(job.model, share):
        ends[name] = ends[name] + elements(job, ops, rows).take(index).times(count)
    root, embedding, layer = ends["root"], ends["embedding"], none
    total = root + embedding
    for one, passing, count in zip(layers, at_once, share.layers, strict=True):
        total = total + one.times(count)
        layer = layer.largest(passing.times(np.minimum(count, 1.0)))
    return Held(total, root, layer, embedding)


def _ends(model: ModelSpec, share: Share) -> Iterator[tuple[str, list[Op], Floats]]:
    """The FSDP units of the embedding and of the head in memory: their names, operations, and 1 for every row that has
    these. A table that is also the head is the root's on either stage, for it stays gathered."""
    embedding, head = embedding_ops(model), head_ops(model)
    for unit in units((*embedding, *head)):
        first = [op for op in unit.ops if op in embedding]
        last = [op for op in unit.ops if op in head]
        if first and last and model.tie_word_embeddings:
            # A head that shares the token table is one tensor with it; on another stage it is a copy.
            yield unit.name, first, np.maximum(share.head, share.embedding)
        elif first:
            yield unit.name, first, share.embedding
        if last:
            yield unit.name, last, share.head


def elements(job: Job, ops: Iterable[Op], x: Columns, *, at_once: bool = False) -> Elements:
    """`Elements` of the parameters of `ops`, for every row of `x`; `at_once`: of a tile where ZeRO-3 gathers tiles."""
    found = Elements(*(np.zeros(len(x)) for _ in fields(Elements)))
    for op in ops:
        for param in op.params:
            # Frozen matrices lie in the dtype that they are multiplied in.
            matrix = op.kind in ("linear", "lora") and is_hidden(param) and len(param.dims) > 1 and not param.frozen
            tiled = matrix and is_tiled(job.model, op)
            # Tiles are cast one by one, and none is kept.
            one = _of_param(job, param, x, np.where(x.tiles > 1, 0.0, 1.0) if tiled else np.full(len(x), float(matrix)))
            found = found + (one.times(np.where(x.zero == 3, 1.0 / x.tiles, 1.0)) if tiled and at_once else one)
    return found


def padded_elements(unit: Unit, x: Columns) -> tuple[Floats, Floats]:
    """Elements of the parameters of `unit` as they travel, and of those that are trained, (rows,) each: cut by tp and
    ep, and padded so that all ranks that divide them have equally many."""
    every, trained = np.zeros(len(x)), np.zeros(len(x))
    for param in unit.params:
        routed = is_routed(param)
        shape, degree = _local_shape(param, x), divided(x, routed=routed)
        shape[routed] = -(-shape[routed] // degree) * degree
        size = prod(shape)
        every = every + size
        trained = trained + (0 if param.frozen else size)
    return every, trained


def _local_shape(param: Param, x: Columns) -> list[Ints]:
    return [np.broadcast_to(np.asarray(size), len(x)) for size in cut_shape(param, x.tp, x.ep, x.expert_tp)]


def _of_param(job: Job, param: Param, x: Columns, matrix: Floats) -> Elements:
    """`Elements` of one parameter. Dense tensors are divided by dim 0, experts' by the dim after "experts"."""
    routed = is_routed(param)
    shape = _local_shape(param, x)
    degree = divided(x, routed=routed)
    whole = np.asarray(prod(shape), np.float64)
    part = _part_numel(param, x, degree)
    states = np.zeros(len(x))
    for state in states_of(job.optim, param):
        itemsize = ITEMSIZE[state.dtype or job.precision.param]
        states = states + itemsize * _part_numel(state.tensor, x, degree if state.sharded else 1)
    if param.frozen:
        each, none = job.precision.itemsize(frozen=True, quantized=param.quantized), np.zeros(len(x))
        return Elements(whole, part * degree, part, whole * matrix, none, none, none, none, each * whole, each * part)
    none = np.zeros(len(x))
    return Elements(whole, part * degree, part, whole * matrix, states, whole, part * degree, part, none, none)


def _part_numel(tensor: Param, x: Columns, degree: Ints | int) -> Floats:
    """Elements of the largest part of `tensor` where ZeRO shards its first dim, experts aside, over `degree` ranks."""
    shape = _local_shape(tensor, x)
    if shape:
        shape[is_routed(tensor)] = -(-shape[is_routed(tensor)] // degree)
    return np.broadcast_to(np.asarray(prod(shape), np.float64), len(x))


def is_pure(job: Job) -> bool:
    """Whether there are no masters: parameters are updated in the dtype they are used in."""
    return job.precision.param == job.precision.compute


def state_bytes(job: Job, x: Columns, own: Held) -> dict[str, Floats]:
    """Bytes of "params", "grads" and "optimizer" (masters included) that stay through the step.

    Without `half_weights` (FSDP2's way), ZeRO of any stage divides all three at rest; with it, stage by stage.
    """
    total, engine = own.total, job.engine
    param, compute = ITEMSIZE[job.precision.param], job.itemsize
    part = np.where(x.zero > 0, total.part, total.whole)
    if not engine.half_weights:
        trained = param * np.where(x.zero > 0, total.trained_part, total.trained)
        frozen = np.where(x.zero > 0, total.frozen_part, total.frozen)
        return {"params": trained + frozen, "grads": trained, "optimizer": total.states}
    grad = compute if is_pure(job) else engine.grad_itemsize
    grads = grad * np.where(x.zero >= 2, total.part, total.whole)
    if engine.half_grads and not is_pure(job):
        grads = grads + compute * np.where(x.zero >= 2, 0.0, total.whole)
    masters = 0 if is_pure(job) else param
    return {
        "params": compute * np.where(x.zero == 3, total.part, total.whole),
        "grads": grads,
        "optimizer": total.states + masters * part,
    }


def update_bytes(job: Job, x: Columns, own: Held) -> Floats:
    """Bytes that the update copies of a rank's part in passing."""
    trained = np.where(x.zero > 0, own.total.trained_part, own.total.trained)
    return np.asarray(job.engine.update_itemsize * trained)


@dataclass(frozen=True)
class Gathered:
    """Bytes that the forward and backward passes hold beside the states, at most, (rows,) each.

    `params`: parameters put together from all ranks. `accumulated`: whole gradients that wait for the last microbatch.
    `grads`: whole gradients of the microbatch at hand, on their way to be divided.

    Of these, `loss` are there when the loss is computed, `layer` in the backward of a layer, the buffers in which its
    gradients are summed included, and `end` in that of the embedding, when the root's gradients are summed, too.
    """

    params: Floats
    accumulated: Floats
    grads: Floats
    loss: Floats
    layer: Floats
    end: Floats


def gathered(job: Job, x: Columns, own: Held, microbatches: Ints) -> Gathered:
    """What dividing states costs in passing, on any rank; all zero where nothing is divided.

    ZeRO-1 and 2 keep every unit whole from its first use in a step to its last; ZeRO-3 keeps the root and one other,
    while the next one is on its way. Gradients are whole for the root and one other unit, in the compute dtype; where
    there is more than one microbatch, ZeRO-1 also accumulates those of all units, in the dtype they are reduced in.
    Engines with weights in the compute dtype gather nothing before ZeRO-3.
    """
    compute, reduce = job.itemsize, ITEMSIZE[job.precision.reduce]
    root, layer, shards = own.root, own.layer, x.zero == 3
    every = compute * own.total.padded
    kept = reduce * np.where((x.zero == 1) & (microbatches > 1), own.total.trained, 0.0)
    # Summed from one buffer into another, in the dtype of the reduction.
    summed = reduce * (1 + 1 / np.maximum(1, divided(x)))
    in_loss = np.where(shards, compute * (root.padded + layer.padded), every)
    # The buffer that the last layer came in goes when another unit comes, and that of the unit whose gradients were
    # summed last when others are.
    came, again = shards | (microbatches == 1), (x.zero >= 2) & (microbatches > 1)
    summed_last = np.where(
        own.embedding.trained_padded > 0,
        own.embedding.trained_padded,
        np.maximum(root.trained_padded, layer.trained_padded),
    )
    waiting = compute * np.where(came, layer.padded, 0.0) + reduce * np.where(again, summed_last, 0.0)
    in_layer = in_loss + compute * (np.where(shards, layer.padded, 0.0) + root.trained + layer.trained)
    if not job.engine.head_stays:
        in_layer = in_layer - compute * (np.where(shards, root.padded, 0.0) + root.trained)
    last = np.maximum(root.trained_padded, own.embedding.trained_padded)
    whole_grads = compute * (root.trained + own.embedding.trained)
    at_end = np.where(shards, compute * root.padded, every) + whole_grads + summed * last
    active = (divided(x) > 1) & (shards | (not job.engine.half_weights))
    return Gathered(
        *(
            np.where(active, size, 0.0)
            for size in (
                np.where(shards, compute * (root.padded + own.largest_padded), every),
                kept,
                compute * (root.trained + own.largest_trained),
                in_loss + kept + waiting,
                in_layer + kept + summed * layer.trained_padded,
                at_end + kept,
            )
        )
    )
