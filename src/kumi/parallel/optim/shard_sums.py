"""Which axes of the mesh shard a parameter, and sums over the ranks that hold its parts.

Experts are tensors of their own here: ep deals them out and shards none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kumi.parallel.grad_sync import sum_over
from kumi.parallel.mesh import Mesh
from kumi.spec.layout import Layout
from kumi.spec.op import Param
from kumi.spec.process_groups import axis
from kumi.spec.shard_slices import tp_replicas
from kumi.spec.sharding import DIM_TO_AXIS, is_routed

# Every axis that may shard a parameter, ZeRO's first.
AXES = ("zero", "expert_dp", "tp", "expert_tp")


@lru_cache(maxsize=65536)
def axes_of(param: Param, layout: Layout, dim: int) -> tuple[str, ...]:
    """Return the names of the axes of more than one rank that shard dim number `dim` of `param`: ZeRO's, then tp's."""
    routed = is_routed(param)
    names = []
    if dim == routed and layout.zero > 0:
        names.append("expert_dp" if routed else "zero")
    if DIM_TO_AXIS.get(param.dims[dim].name) == "tp" and (routed or tp_replicas(param, layout).degree < layout.tp):
        names.append("expert_tp" if routed else "tp")
    return tuple(name for name in names if axis(layout, name).degree > 1)


def all_axes_of(param: Param, layout: Layout) -> tuple[str, ...]:
    """Return the names of the axes that shard any dim of `param`, ZeRO's first; each shards one."""
    sharding = {name for dim in range(len(param.dims)) for name in axes_of(param, layout, dim)}
    return tuple(name for name in AXES if name in sharding)


def _copies(param: Param, layout: Layout, name: str) -> int:
    """How many ranks of the axis hold the same part: of key-value heads fewer than tp ranks, several."""
    return tp_replicas(param, layout).degree if name == "tp" else 1


def sum_parts(items: Sequence[tuple[Tensor, Param, tuple[str, ...]]], mesh: Mesh) -> None:
    """Sum each tensor, in place, over the ranks of the axes named with it, every part of `param` counted once.

    All ranks of a group must give equally shaped tensors in the same order. One message a group and dtype.
    """
    summed: dict[str, list[Tensor]] = defaultdict(list)
    for tensor, param, names in items:
        for name in names:
            if (copies := _copies(param, mesh.layout, name)) > 1:
                tensor.div_(copies)
            summed[name].append(tensor)
    for name in AXES:
        if name in summed:
            sum_over(summed[name], mesh.groups[name])


def max_over(tensor: Tensor, names: tuple[str, ...], mesh: Mesh) -> None:
    """Replace `tensor` by its element-wise maximum over the ranks of the axes `names`."""
    for name in names:
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=mesh.groups[name])
