"""The shards of each parameter: the mesh axis that shards each dim, and the size of each rank's shard.

The cost model and the trainer both use these functions. A parameter is sharded three times:

    pp   A rank has the layers of its stages. The embedding is on the first stage, the head on the last, and a tied
         embedding on both.
    tp   Shards the dims in `DIM_TO_AXIS` by complete units (heads, groups of heads, columns). A vocabulary that tp does
         not divide is padded. Key-value heads are replicated if there are fewer heads than ranks. For routed experts,
         ep shards "experts", and expert_tp the other dims.
    ZeRO Shards the tp shard again over the ranks that would hold the same one: dp_shard x cp ranks, because
         context-parallel ranks have the same weights, and dp_shard x cp x tp / (ep x expert_tp) ranks for routed
         experts. Dense tensors are sharded by dim 0, experts by the dim after "experts", quantized matrices by their
         blocks, in ZeRO-3 only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from kumi.spec.layout import Layout
from kumi.spec.ledger import LAYERS, embedding_ops, head_ops, is_layer_param, layer_ops, params
from kumi.spec.lora import NF4_BLOCK_BYTES, nf4_blocks
from kumi.spec.model import ModelSpec
from kumi.spec.op import Dim, Op, Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import states_of
from kumi.spec.precision import ITEMSIZE, Precision
from kumi.spec.process_groups import Axis, process_group
from kumi.spec.schedule import stage_assignment, stage_of
from kumi.spec.schedules import V_SHAPED

# Name of a dim -> the mesh axis that may shard it.
DIM_TO_AXIS = {
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "groups": "tp",
    "ffn": "tp",
    "experts": "ep",
    "layers": "pp",
    "seq": "cp",
}


def tp_style(op: Op) -> str:
    """Return the tensor-parallel style of the weights of `op`.

    "vocab": rows of the vocabulary are sharded. "column": outputs are sharded. "row": inputs are sharded, so results
    must be summed. Else "replicated".
    """
    if op.kind in ("embedding", "log_prob"):
        return "vocab"
    if op.kind != "linear":
        return "replicated"
    source, target = (DIM_TO_AXIS.get(dim.name) == "tp" for dim in (op.source, op.target))
    return "row" if source else "column" if target else "replicated"


def is_routed(param: Param) -> bool:
    """True if `param` is a parameter of routed experts."""
    return bool(param.dims) and param.dims[0].name == "experts"


def shard_size(dim: Dim, degree: Any) -> Any:
    """Return the size of a shard of `dim` over `degree` ranks: complete units, the same number on each rank.

    Units that do not divide evenly are padded (the vocabulary), or replicated if there are fewer units than ranks
    (key-value heads). `degree` is an int, or an array of ints.
    """
    return -(-dim.count // degree) * dim.unit


def shard_shape(param: Param, tp: Any, ep: Any, expert_tp: Any) -> tuple[Any, ...]:
    """Return the shape of the shard of `param` on a rank before ZeRO; degrees are ints, or arrays of ints."""
    routed = is_routed(param)
    degrees = {"tp": expert_tp if routed else tp, "ep": ep}
    return tuple(shard_size(dim, degrees.get(DIM_TO_AXIS.get(dim.name, ""), 1)) for dim in param.dims)


@dataclass(frozen=True)
class RowRange:
    """The `count` rows of a dim on a rank, from row `start`. A rank past the end has no rows."""

    start: int
    count: int


def shard_rows(size: int, degree: int, index: int) -> RowRange:
    """Return the rows of shard `index` if `size` rows are sharded over `degree` ranks as FSDP2 and DTensor do.

    All shards have the same number of rows, except for shorter shards at the end (as with `torch.chunk`).
    """
    height = -(-size // degree)
    start = min(index * height, size)
    return RowRange(start, min(height, size - start))


def zero_group(*, routed: bool) -> str:
    """Return the name of the process group over which ZeRO shards a parameter; at zero=0 its ranks are replicas."""
    return "expert_dp" if routed else "zero"


def zero_degree(layout: Any, *, routed: bool) -> Any:
    """Return the number of ranks over which ZeRO shards a parameter; `layout` is a `Layout` or a `LayoutBatch`."""
    return process_group(layout, zero_group(routed=routed))[0]


def zero_axis(layout: Layout, *, routed: bool) -> Axis:
    """Return the axis over which ZeRO shards a parameter."""
    name = zero_group(routed=routed)
    return Axis(name, *process_group(layout, name))


def local_shape(param: Param, layout: Layout, rank: int, *, sharded: bool = True) -> tuple[int, ...]:
    """Return the shape of the resident shard of `param` on `rank`, if its stage has it.

    ZeRO shards the parameter unless `sharded` is false, as for some optimizer states.
    """
    shape = list(shard_shape(param, layout.tp, layout.ep, layout.expert_tp))
    if layout.zero > 0 and sharded:
        routed = is_routed(param)
        ranks = zero_axis(layout, routed=routed)
        # The index of the dim that ZeRO shards: the first one, or for routed experts the one after "experts".
        index = int(routed)
        shape[index] = shard_rows(shape[index], ranks.degree, ranks.index(rank)).count
    return tuple(shape)


def local_numel(param: Param, layout: Layout, rank: int) -> int:
    """Return the number of elements of the resident shard of `param` on `rank`, if its stage has it."""
    return prod(local_shape(param, layout, rank))


def even_stages(layers: int, stages: Any) -> tuple[Any, Any, Any]:
    """Return the minimum number of layers per stage, and the stages [begin, end) with one layer more, if `layers` are
    distributed evenly over `stages`, an int or an array of ints.

    The last stage has the head and gets no extra layer. The first stage has the embedding and the most microbatches in
    flight, and gets an extra layer only if all stages between the two have one. With two stages more than layers, the
    first has only the embedding and the last only the head.
    """
    extra = layers % stages
    begin = 1 - (extra == stages - 1)
    return layers // stages, begin, begin + extra


def stage_bounds(layout: Layout, layers: int) -> tuple[tuple[int, int], ...]:
    """Return the layers [first, last) of each stage in model order: by `layout.stage_layers`, or evenly distributed."""
    count = layout.pp * layout.stages
    each, begin, end = even_stages(layers, count)
    sizes = layout.stage_layers or [each + (begin <= stage < end) for stage in range(count)]
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def rank_layers(layout: Any, layers: int, rank: Any) -> Any:
    """Return how many of `layers` the pp rank `rank` has, over all its stages. `layout` is a `Layout`, or
    `kumi.plan.layout_batch.LayoutBatch` with an array of ranks."""
    if layout.stage_layers:
        return sum(
            layout.stage_layers[stage] for stage in stage_assignment(layout.schedule, layout.pp, layout.stages)[rank]
        )
    pp, stages = layout.pp, layout.stages
    each, begin, end = even_stages(layers, pp * stages)
    # Round-robin: the stages rank, rank + pp, ... before `end`, without stage 0 if it is before `begin`.
    round_robin = (end - rank + pp - 1) // pp - (rank < begin)
    # V-shaped: stage `rank` on the way down, and stage `far` on the way back.
    far = stage_of(True, pp, rank, 1)
    folded = 1 * ((begin <= rank) & (rank < end)) + ((begin <= far) & (far < end))
    return each * stages + round_robin + layout.one_of("schedule", V_SHAPED) * (folded - round_robin)


def max_rank_layers(layout: Layout, layers: int) -> int:
    """Return the largest number of `layers` on a pp rank."""
    return max(int(rank_layers(layout, layers, rank)) for rank in range(layout.pp))


def rank_params(model: ModelSpec, layout: Layout, rank: int) -> tuple[Param, ...]:
    """Return the parameters of the stages of `rank`, in the order of the forward pass."""
    if layout.pp * layout.stages == 1:
        return params(model)
    bounds = stage_bounds(layout, model.num_hidden_layers)
    stages = stage_assignment(layout.schedule, layout.pp, layout.stages)[layout.coords(rank)["pp"]]
    stage_operations = (
        stage_ops(model, range(*bounds[stage]), embedding=stage == 0, head=stage == len(bounds) - 1, shared=0 in stages)
        for stage in stages
    )
    return tuple(param for ops in stage_operations for op in ops for param in op.params)


def stage_ops(
    model: ModelSpec, layers: Iterable[int], *, embedding: bool, head: bool, shared: bool = False
) -> tuple[Op, ...]:
    """Return the operations of a pipeline stage with the layers `layers`, in the order of the forward pass.

    A stage with a tied head but without the embedding has a copy of the embedding, which comes last. If the rank also
    has the embedding's stage, the embedding is `shared` and belongs to that stage.
    """
    first = embedding_ops(model) if embedding else ()
    inner = [op for index in layers for op in layer_ops(model, index)]
    last = head_ops(model) if head else ()
    copied = head and model.tie_word_embeddings and not (embedding or shared)
    return (*first, *inner, *last, *(embedding_ops(model)[:1] if copied else ()))


@dataclass(frozen=True)
class FsdpUnit:
    """Operations with parameters that FSDP all-gathers and reduce-scatters together.

    - `name`: "embedding" (tokens and positions), "layer", "experts" (the routed experts of a layer), "head" (with the
      final norm) or "root".
    - `modules`: names of the modules with these parameters; "" for the decoder without the modules of other units.
    - `ops`: the operations, in the order of the forward pass.
    """

    name: str
    modules: tuple[str, ...]
    ops: tuple[Op, ...]

    @property
    def params(self) -> tuple[Param, ...]:
        return tuple(param for op in self.ops for param in op.params)


def fsdp_units(ops: Iterable[Op]) -> tuple[FsdpUnit, ...]:
    """Return the FSDP units of a stage with operations `ops`, in the order of the forward pass, the root last.

    The root has the norm of the embeddings and, if the head is tied, the token table and the final norm. It is
    all-gathered at the start of the forward and freed at the end of the backward, which needs the head first.
    """
    ops = list(ops)
    tied = any(op.kind == "log_prob" and not op.params for op in ops)
    parts: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        if op.params:
            parts.setdefault(_unit_of(op, tied=tied), []).append(op)
    root = parts.pop(("root", ""), None)
    listed = [FsdpUnit(name, _modules(name, module, own), tuple(own)) for (name, module), own in parts.items()]
    return (*listed, *([FsdpUnit("root", ("",), tuple(root))] if root else []))


def _unit_of(op: Op, *, tied: bool) -> tuple[str, str]:
    """Return the name of the unit of `op`, and the name of the module that contains all its operations."""
    first = op.params[0]
    if is_layer_param(first):
        layer = LAYERS + first.name.removeprefix(LAYERS).partition(".")[0]
        return ("experts", first.name.rpartition(".")[0]) if is_routed(first) else ("layer", layer)
    if not tied and op.kind in ("embedding", "positions"):
        return "embedding", ""
    return ("head", "") if not tied and op.name in ("model.norm", "lm_head", "score") else ("root", "")


def _modules(name: str, module: str, ops: Sequence[Op]) -> tuple[str, ...]:
    """Return the names of the modules of the unit `name`; in the embedding and head, each operation is a module."""
    return tuple(op.name for op in ops) if name in ("embedding", "head") else (module,)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of the resident states on a rank, between the backward pass and the update."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


def state_bytes(model: ModelSpec, layout: Layout, rank: int, precision: Precision, optim: Optim) -> StateBytes:
    """Return the bytes of parameters, gradients and optimizer states on `rank`.

    Trained parameters have the precision's `param` dtype, frozen ones the compute dtype or their quantized format. A
    rank with an empty FSDP2 shard of a tensor has only its unsharded states, such as the step counter.
    """
    itemsize, own = ITEMSIZE[precision.param], rank_params(model, layout, rank)
    frozen = sum(_frozen_bytes(param, layout, rank, precision) for param in own if param.frozen)
    trained = [param for param in own if not param.frozen]
    size = itemsize * sum(local_numel(param, layout, rank) for param in trained)
    states = sum(
        (ITEMSIZE[state.dtype] if state.dtype else itemsize)
        * prod(local_shape(state.tensor, layout, rank, sharded=state.sharded))
        for param in trained
        for state in states_of(optim, param)
    )
    return StateBytes(size + frozen, size, states)


def _frozen_bytes(param: Param, layout: Layout, rank: int, precision: Precision) -> int:
    """Return the bytes of the frozen `param` on `rank`."""
    if not param.quantized:
        return local_numel(param, layout, rank) * ITEMSIZE[precision.compute]
    return NF4_BLOCK_BYTES * packed_rows(local_shape(param, layout, rank, sharded=False), layout, rank).count


def packed_rows(shape: tuple[int, ...], layout: Layout, rank: int) -> RowRange:
    """Return which blocks of a quantized matrix, which has `shape` after tp, are on `rank`.

    ZeRO-3 shards the matrix between blocks. ZeRO-1 and 2 do not shard it: it has no gradients and optimizer states.
    """
    axis = zero_axis(layout, routed=False)
    blocks = nf4_blocks(prod(shape))
    return shard_rows(blocks, axis.degree, axis.index(rank)) if layout.zero == 3 else RowRange(0, blocks)


def checkpoint_bytes(model: ModelSpec, precision: Precision, optim: Optim) -> int:
    """Return the bytes of a checkpoint over all ranks: trained parameters and optimizer states, each once."""
    states = state_bytes(model, Layout(), 0, precision, optim)
    return states.grads + states.optimizer
