"""The mesh axes that shard a parameter, and sums over the ranks that shard it.

Each expert counts as a tensor of its own here: ep distributes experts and shards none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kumi.parallel.grad_sync import all_reduce_grads
from kumi.parallel.mesh import Mesh
from kumi.spec.layout import Layout
from kumi.spec.op import Param
from kumi.spec.process_groups import axis
from kumi.spec.shard_slices import tp_replicas
from kumi.spec.sharding import DIM_TO_AXIS, is_routed

# Every axis that may shard a parameter, ZeRO's first.
SHARDING_AXES = ("zero", "expert_dp", "tp", "expert_tp")


@lru_cache(maxsize=65536)
def axes_of_dim(param: Param, layout: Layout, dim: int) -> tuple[str, ...]:
    """Return the names of the axes of more than one rank that shard dim number `dim` of `param`: ZeRO's, then tp's."""
    routed = is_routed(param)
    names = []
    if dim == routed and layout.zero > 0:
        names.append("expert_dp" if routed else "zero")
    if DIM_TO_AXIS.get(param.dims[dim].name) == "tp" and (routed or tp_replicas(param, layout).degree < layout.tp):
        names.append("expert_tp" if routed else "tp")
    return tuple(name for name in names if axis(layout, name).degree > 1)


def axes_of_param(param: Param, layout: Layout) -> tuple[str, ...]:
    """Return the names of the axes that shard any dim of `param`, ZeRO's first; an axis shards one dim."""
    sharding = {name for dim in range(len(param.dims)) for name in axes_of_dim(param, layout, dim)}
    return tuple(name for name in SHARDING_AXES if name in sharding)


def _replicas(param: Param, layout: Layout, name: str) -> int:
    """Return the number of ranks of the axis with the same shard: more than one if there are fewer key-value heads than
    tp ranks."""
    return tp_replicas(param, layout).degree if name == "tp" else 1


def sum_shards(items: Sequence[tuple[Tensor, Param, tuple[str, ...]]], mesh: Mesh) -> None:
    """Sum each tensor, in place, over the ranks of its axes, counting every shard of `param` once.

    All ranks of a group must give tensors of the same shapes in the same order. Each group sends one message per dtype.
    """
    summed: dict[str, list[Tensor]] = defaultdict(list)
    for tensor, param, names in items:
        for name in names:
            if (replicas := _replicas(param, mesh.layout, name)) > 1:
                tensor.div_(replicas)
            summed[name].append(tensor)
    for name in SHARDING_AXES:
        if name in summed:
            all_reduce_grads(summed[name], mesh.groups[name])


def max_over_axes(tensor: Tensor, names: tuple[str, ...], mesh: Mesh) -> None:
    """Replace `tensor` by its element-wise maximum over the ranks of the axes `names`."""
    for name in names:
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=mesh.groups[name])
