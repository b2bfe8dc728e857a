"""Which mesh axis cuts which dim, and how much of every parameter a rank holds.

The cost model divides by this table and the trainer shards by it. A parameter is cut three times:

    pp   a rank has the layers of its stages; the embedding is on the first stage, the head on the last, and a tied
         embedding on both
    tp   cuts the dims that `AXIS` names into whole units (heads, groups of them, columns); a vocabulary that tp does
         not divide is padded, and a key-value head that ranks outnumber is held by several. Of routed experts, ep cuts
         "experts" and expert_tp the rest
    ZeRO divides what is left among the ranks that hold the same: dp_shard x cp of them, for context-parallel ranks
         have equal weights, and dp_shard x cp x tp / (ep x expert_tp) for routed experts. Dense tensors are divided by
         dim 0, experts' by the dim after "experts"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from kumi.spec.layout import Layout
from kumi.spec.ledger import LAYERS, embedding_ops, head_ops, is_hidden, layer_ops, params
from kumi.spec.model import ModelSpec
from kumi.spec.op import Dim, Op, Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import states_of
from kumi.spec.precision import ITEMSIZE, Precision
from kumi.spec.process_groups import Axis, process_group
from kumi.spec.schedule import placement, stage_of
from kumi.spec.schedules import V_SHAPED

AXIS = {
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "groups": "tp",
    "ffn": "tp",
    "experts": "ep",
    "layers": "pp",
    "seq": "cp",
}


def style(op: Op) -> str:
    """How tensor parallelism holds the weights of `op`: "vocab" (rows of the vocabulary), "column" (outputs cut),
    "row" (inputs cut, so that results must be summed) or "replicated"."""
    if op.kind in ("embedding", "log_prob"):
        return "vocab"
    if op.kind != "linear":
        return "replicated"
    source, target = (AXIS.get(dim.name) == "tp" for dim in (op.source, op.target))
    return "row" if source else "column" if target else "replicated"


def is_routed(param: Param) -> bool:
    """Whether `param` holds weights of routed experts."""
    return bool(param.dims) and param.dims[0].name == "experts"


def cut(dim: Dim, degree: Any) -> Any:
    """Size of the part of `dim` that each of `degree` ranks holds: whole units, the same on all.

    Where the units do not go up evenly they are padded (the vocabulary) or, being fewer than ranks, held by several
    (key-value heads). `degree` is a whole number, or a numpy array of them.
    """
    return -(-dim.count // degree) * dim.unit


def cut_shape(param: Param, tp: Any, ep: Any, expert_tp: Any) -> tuple[Any, ...]:
    """Shape of the part of `param` on a rank, ZeRO aside; degrees are whole numbers, or numpy arrays of them."""
    routed = is_routed(param)
    degrees = {"tp": expert_tp if routed else tp, "ep": ep}
    return tuple(cut(dim, degrees.get(AXIS.get(dim.name, ""), 1)) for dim in param.dims)


@dataclass(frozen=True)
class Rows:
    """The rows of a dim that a rank holds: `count` of them from `start`. A rank past the end holds none."""

    start: int
    count: int


def shard_rows(size: int, degree: int, index: int) -> Rows:
    """Rows of shard `index` when `size` rows are cut into `degree` pieces of equal height, the last ones shorter.

    PyTorch's FSDP2 and DTensor cut this way (as `torch.chunk` does).
    """
    height = -(-size // degree)
    start = min(index * height, size)
    return Rows(start, min(height, size - start))


def zero_group(*, routed: bool) -> str:
    """Name of the process group that holds the same part of a parameter, and divides it when zero > 0."""
    return "expert_dp" if routed else "zero"


def zero_degree(layout: Any, *, routed: bool) -> Any:
    """How many ranks divide a parameter when zero > 0; `layout` is a `Layout` or columns of layouts."""
    return process_group(layout, zero_group(routed=routed))[0]


def zero_axis(layout: Layout, *, routed: bool) -> Axis:
    """The ranks that divide a parameter when zero > 0."""
    name = zero_group(routed=routed)
    return Axis(name, *process_group(layout, name))


def local_shape(param: Param, layout: Layout, rank: int, *, sharded: bool = True) -> tuple[int, ...]:
    """Shape of the part of `param` that `rank` keeps between steps, if its stage has it.

    ZeRO shards it unless `sharded` is false, as of some optimizer states.
    """
    shape = list(cut_shape(param, layout.tp, layout.ep, layout.expert_tp))
    if layout.zero > 0 and sharded:
        routed = is_routed(param)
        ranks = zero_axis(layout, routed=routed)
        shape[routed] = shard_rows(shape[routed], ranks.degree, ranks.index(rank)).count
    return tuple(shape)


def local_numel(param: Param, layout: Layout, rank: int) -> int:
    """Elements of `param` that `rank` keeps between steps, if its stage has it."""
    return prod(local_shape(param, layout, rank))


def even_stages(layers: int, stages: Any) -> tuple[Any, Any, Any]:
    """Return how `layers` are divided over `stages` as evenly as can be: how many each stage has at least, and the
    stages [begin, end) that have one more. `stages` is an int, or an array of ints.

    The last stage, which has the head, gets none of the layers left over, and the first, which has the embedding and
    most microbatches in flight, the last of them. With two stages more than layers, the first has only the embedding
    and the last only the head.
    """
    left = layers % stages
    begin = 1 - (left == stages - 1)
    return layers // stages, begin, begin + left


def stage_bounds(layout: Layout, layers: int) -> tuple[tuple[int, int], ...]:
    """Layers [first, last) of every pipeline stage, in model order: `layout.stage_layers`, or as even as can be."""
    count = layout.pp * layout.stages
    each, begin, end = even_stages(layers, count)
    sizes = layout.stage_layers or [each + (begin <= stage < end) for stage in range(count)]
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def rank_layers(layout: Any, layers: int, rank: Any) -> Any:
    """Return how many of `layers` pp rank `rank` has, over all its stages. `layout` is a `Layout`, or
    `kumi.plan.layout_batch.LayoutBatch` with an array of ranks."""
    if layout.stage_layers:
        return sum(layout.stage_layers[stage] for stage in placement(layout.schedule, layout.pp, layout.stages)[rank])
    pp, stages = layout.pp, layout.stages
    each, begin, end = even_stages(layers, pp * stages)
    # Of the stages rank, rank + pp, ... so many come before stage `end`, and only stage 0 can before `begin`.
    dealt = (end - rank + pp - 1) // pp - (rank < begin)
    far = stage_of(True, pp, rank, 1)
    folded = 1 * ((begin <= rank) & (rank < end)) + ((begin <= far) & (far < end))
    return each * stages + dealt + layout.one_of("schedule", V_SHAPED) * (folded - dealt)


def most_layers(layout: Layout, layers: int) -> int:
    """Return how many of `layers` the pp rank has that has most."""
    return max(int(rank_layers(layout, layers, rank)) for rank in range(layout.pp))


def held_params(model: ModelSpec, layout: Layout, rank: int) -> tuple[Param, ...]:
    """The parameters of which `rank` has a part, in the order of the forward pass."""
    if layout.pp * layout.stages == 1:
        return params(model)
    bounds = stage_bounds(layout, model.num_hidden_layers)
    stages = placement(layout.schedule, layout.pp, layout.stages)[layout.coords(rank)["pp"]]
    stage_operations = (
        stage_ops(model, range(*bounds[stage]), embedding=stage == 0, head=stage == len(bounds) - 1, shared=0 in stages)
        for stage in stages
    )
    return tuple(param for ops in stage_operations for op in ops for param in op.params)


def stage_ops(
    model: ModelSpec, layers: Iterable[int], *, embedding: bool, head: bool, shared: bool = False
) -> tuple[Op, ...]:
    """The operations of a pipeline stage with these layers, in the order of the forward pass.

    A tied head apart from the embedding has a copy of the token table, which comes last; where the rank has the
    embedding's stage, too, the table is `shared` and belongs to that stage.
    """
    first = embedding_ops(model) if embedding else ()
    inner = [op for index in layers for op in layer_ops(model, index)]
    last = head_ops(model) if head else ()
    copied = head and model.tie_word_embeddings and not (embedding or shared)
    return (*first, *inner, *last, *(embedding_ops(model)[:1] if copied else ()))


@dataclass(frozen=True)
class Unit:
    """Operations whose parameters FSDP gathers and reduces as one.

    `name` is "embedding" (the tables of tokens and positions), "layer", "experts" (the routed experts of a layer) or
    "root"; `modules` are the names of the modules that have these parameters, those of inner units left out, "" for
    the whole decoder.
    """

    name: str
    modules: tuple[str, ...]
    ops: tuple[Op, ...]

    @property
    def params(self) -> tuple[Param, ...]:
        return tuple(param for op in self.ops for param in op.params)


def units(ops: Iterable[Op]) -> tuple[Unit, ...]:
    """The FSDP units of a stage with operations `ops`, in the order of the forward pass, the root last.

    The root has the final norm and the head, the norm of the embeddings, and the tables where the head is one of them;
    it is gathered when the forward begins and kept until the backward, which needs the head first, has ended.
    """
    ops = list(ops)
    tied = any(op.kind == "log_prob" and not op.params for op in ops)
    parts: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        if op.params:
            parts.setdefault(_unit_of(op, tied=tied), []).append(op)
    root = parts.pop(("root", ""), None)
    listed = [Unit(name, _modules(name, module, own), tuple(own)) for (name, module), own in parts.items()]
    return (*listed, *([Unit("root", ("",), tuple(root))] if root else []))


def _unit_of(op: Op, *, tied: bool) -> tuple[str, str]:
    """Name of the unit of `op`, and of the module that all of its operations are in."""
    first = op.params[0]
    if is_hidden(first):
        layer = LAYERS + first.name.removeprefix(LAYERS).partition(".")[0]
        return ("experts", first.name.rpartition(".")[0]) if is_routed(first) else ("layer", layer)
    return ("embedding", "") if op.kind in ("embedding", "positions") and not tied else ("root", "")


def _modules(name: str, module: str, ops: Sequence[Op]) -> tuple[str, ...]:
    return tuple(op.name for op in ops) if name == "embedding" else (module,)


@dataclass(frozen=True)
class StateBytes:
    """Bytes a rank holds for the model's states between the backward pass and the update."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


def state_bytes(model: ModelSpec, layout: Layout, rank: int, precision: Precision, optim: Optim) -> StateBytes:
    """Bytes of parameters, gradients and optimizer states on `rank`: those that are trained in the precision's `param`
    dtype, others as they lie frozen.

    Under FSDP2 a rank whose shard of a tensor is empty keeps only the states of it that ZeRO does not shard, such as
    the step counter.
    """
    itemsize, found = ITEMSIZE[precision.param], held_params(model, layout, rank)
    frozen = sum(
        local_numel(param, layout, rank) * precision.itemsize(frozen=True, quantized=param.quantized)
        for param in found
        if param.frozen
    )
    trained = [param for param in found if not param.frozen]
    size = itemsize * sum(local_numel(param, layout, rank) for param in trained)
    states = sum(
        (ITEMSIZE[state.dtype] if state.dtype else itemsize)
        * prod(local_shape(state.tensor, layout, rank, sharded=state.sharded))
        for param in trained
        for state in states_of(optim, param)
    )
    return StateBytes(size + round(frozen), size, states)


def checkpoint_bytes(model: ModelSpec, precision: Precision, optim: Optim) -> int:
    """Bytes of the tensors in a checkpoint, over all ranks: trained parameters and optimizer states, each once."""
    whole = state_bytes(model, Layout(), 0, precision, optim)
    return whole.grads + whole.optimizer
