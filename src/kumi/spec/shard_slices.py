"""Which part of every parameter a rank holds, as rectangles of the whole tensor, and who holds the same.

    regions(param, layout, rank)    where the rank's local tensor lies in the global one; padding lies nowhere
    copies(param, layout)           the axes along which ranks hold the same part
    tied_copies(model, ...)         the same for a tied table, which the first and the last stage hold
    summed_over_tp(model, layout)   parameters whose gradients the tp ranks must add up

Checkpoints, initial weights and the gradient norm are read from here.
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
from kumi.spec.sharding import AXIS, cut, is_routed, shard_rows, style, zero_axis, zero_group


@dataclass(frozen=True)
class Region:
    """A rectangle of `shape`: from `start` of the global tensor on, and from `local` of the rank's own tensor on."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a dim: `count` of them, from `start` of the global and `local` of the local tensor on."""

    start: int
    local: int
    count: int


def regions(param: Param, layout: Layout, rank: int) -> tuple[Region, ...]:
    """Where the tensor that `rank` keeps of `param` lies in the whole; empty where it keeps none of it.

    One rectangle, or two where two matrices that lie side by side are both cut.
    """
    dims = [_runs(dim, *_cut_by(dim, param, layout, rank)) for dim in param.dims]
    if layout.zero > 0 and param.dims:
        routed = is_routed(param)
        size = cut(param.dims[routed], _cut_by(param.dims[routed], param, layout, rank)[0])
        ranks = zero_axis(layout, routed=routed)
        rows = shard_rows(size, ranks.degree, ranks.index(rank))
        dims[routed] = _between(dims[routed], rows.start, rows.start + rows.count)
    found = (
        Region(tuple(run.start for run in runs), tuple(run.local for run in runs), tuple(run.count for run in runs))
        for runs in product(*dims)
    )
    return tuple(region for region in found if region.numel)


def _cut_by(dim: Dim, param: Param, layout: Layout, rank: int) -> tuple[int, int]:
    """How many ranks cut `dim` of `param`, and which of them `rank` is."""
    name = AXIS.get(dim.name, "")
    if name == "tp" and is_routed(param):
        name = "expert_tp"
    if name not in ("tp", "ep", "expert_tp"):
        return 1, 0
    one = axis(layout, name)
    return one.degree, one.index(rank)


def _runs(dim: Dim, degree: int, index: int) -> list[Run]:
    """The rows of `dim` that rank `index` of `degree` holds, padding left out."""
    if degree == 1:
        return [Run(0, 0, dim.size)]
    if dim.count < degree and dim.name != "vocab":
        index = index * dim.count // degree  # neighbours hold the same
    size = cut(dim, degree)
    if is_pair(dim):
        half = size // 2
        return [Run(index * half, 0, half), Run(dim.size // 2 + index * half, half, half)]
    start = min(index * size, dim.size)
    return [Run(start, 0, min(size, dim.size - start))]


def is_pair(dim: Dim) -> bool:
    """Whether two matrices lie side by side along `dim`, so that a rank's part is one of each."""
    return dim.name == "ffn" and dim.unit == 2


def _between(runs: list[Run], first: int, last: int) -> list[Run]:
    """What is left of `runs` where only the local rows [first, last) are kept, which then begin at 0."""
    found = []
    for run in runs:
        begin, end = max(run.local, first), min(run.local + run.count, last)
        found.append(Run(run.start + begin - run.local, begin - first, max(0, end - begin)))
    return found


def copies(param: Param, layout: Layout) -> tuple[Axis, ...]:
    """The axes along which ranks of a stage hold the same part of `param`, dp_replicate first."""
    routed = is_routed(param)
    axes = [axis(layout, "dp_replicate")]
    axes += [] if layout.zero else [axis(layout, zero_group(routed=routed))]
    if not routed:
        axes.append(tp_copies(param, layout))
    elif not any(AXIS.get(dim.name) == "tp" for dim in param.dims):
        axes.append(axis(layout, "expert_tp"))
    return tuple(group for group in axes if group.degree > 1)


def tied_copies(model: ModelSpec, param: Param, layout: Layout) -> tuple[Axis, ...]:
    """The two pipeline ranks that hold `param` where it is a token table, also the head, and its stages are apart."""
    ends = layout.pp > 1 and layout.schedule not in V_SHAPED
    if not (ends and model.tie_word_embeddings and param.name == EMBEDDING):
        return ()
    return (axis(layout, "ends"),)


def tp_copies(param: Param, layout: Layout) -> Axis:
    """The ranks of a tensor-parallel group that hold the same part of `param`: neighbours, all of them where tp cuts
    none of its dims, several where they outnumber its key-value heads, else one."""
    counts = [dim.count for dim in param.dims if AXIS.get(dim.name) == "tp" and dim.name != "vocab"]
    if any(AXIS.get(dim.name) == "tp" and dim.name == "vocab" for dim in param.dims):
        return Axis("tp", 1, 1)
    return Axis("tp", max(1, layout.tp // min(counts)) if counts else layout.tp, 1)


@lru_cache(maxsize=64)
def summed_over_tp(model: ModelSpec, layout: Layout) -> tuple[str, ...]:
    """The parameters that several tp ranks hold alike, and of whose gradients each has a part: its own tokens' (under
    sequence parallelism, what lies between the regions), or its own heads' (inside of them)."""
    if layout.tp == 1:
        return ()
    return tuple(
        param.name
        for op in ops(model)
        for param in op.params
        if not param.frozen and not is_routed(param) and tp_copies(param, layout).degree > 1 and _has_part(op, layout)
    )


def _has_part(op: Op, layout: Layout) -> bool:
    """Whether a tp rank sees only a part of the tokens or heads that `op` works on."""
    if layout.sequence_parallel or style(op) == "column":
        return True
    if op.kind == "lora":
        # Beside a matrix that is cut, A and B work on a rank's own rows or columns.
        return "tp" in (AXIS.get(op.source.name), AXIS.get(op.target.name))
    return op.kind == "norm" and AXIS.get(op.source.name) == "tp"
