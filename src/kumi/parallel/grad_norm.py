"""One gradient norm over all ranks, and clipping by it.

A rank's loss is the sum over its tokens divided by the token count of the whole step, so gradients are sums over the
data ranks (`kumi.parallel.data_parallel` sees to that) and the norm is that of the whole step's gradient.

What ranks hold several times is counted once: the square of each part is divided by the number of its copies among the
ranks that the sum goes over, whichever axes cut it or do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.parallel.mesh import Mesh
from kumi.spec.layout import Layout
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.process_groups import has_sharded_grads
from kumi.spec.shard_slices import replica_axes, tied_axes


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds, sharing its memory.

    A DTensor is known by its methods: to import the class costs one rank alone half a second of CPU time.
    """
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@lru_cache(maxsize=8)
def by_name(spec: ModelSpec) -> Mapping[str, Param]:
    """The parameters and buffers of the whole model by their names."""
    return {tensor.name: tensor for tensor in tensors(spec)}


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float | None, mesh: Mesh, *, loss_scale: float = 1.0) -> Tensor:
    """Scales the gradients of `model`, this rank's part of one, to a global norm of at most `max_norm` and returns the
    norm before clipping.

    Gradients are divided by `loss_scale` first. The norm is a scalar on the gradients' device, float32 (float64 for
    float64 gradients), equal on all ranks; it is not finite when a gradient on any rank is not, and the gradients are
    then of no use. `max_norm` None or 0 clips nothing. One all-reduce where ranks hold different parts, none otherwise,
    and on CUDA the host does not wait.
    """
    named = [(name, value.grad) for name, value in model.named_parameters() if value.grad is not None]
    norm = _norm([(name.removeprefix("module."), grad) for name, grad in named], model, mesh) / loss_scale
    factor = torch.full_like(norm, 1 / loss_scale)
    if max_norm:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if named and (factor.device.type != "cpu" or factor.item() != 1.0):
        grads = [local(grad) for _, grad in named]
        torch._foreach_mul_(grads, factor.to(grads[0].device))  # which may have been offloaded
    return norm


def _norm(grads: list[tuple[str, Tensor]], model: nn.Module, mesh: Mesh) -> Tensor:
    """The global 2-norm."""
    group = norm_group(mesh)
    spec: Any = None if group is None else getattr(model, "module", model).spec
    shared = {} if spec is None else by_name(spec)
    alike: dict[int, list[Tensor]] = defaultdict(list)
    for name, grad in grads:
        alike[_copies(spec, shared[name], mesh.layout) if spec else 1].append(local(grad))
    dtype = torch.promote_types(grads[0][1].dtype, torch.float32) if grads else torch.float32
    square = torch.zeros((), dtype=dtype, device=mesh.device)
    for count, same in sorted(alike.items()):
        square += _square(same, dtype, mesh.device) / count
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def norm_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks over which the squares are summed; None where every rank holds all gradients."""
    return mesh.group("norm") if has_sharded_grads(mesh.layout) else None


@lru_cache(maxsize=4096)
def _copies(spec: ModelSpec, param: Param, layout: Layout) -> int:
    """How many of the ranks that the sum goes over hold the same part of `param`."""
    found = (*replica_axes(param, layout), *tied_axes(spec, param, layout))
    return prod(one.degree for one in found if one.name != "dp_replicate")


def _square(tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sum of squares over all of `tensors`."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack(torch._foreach_norm(filled, 2, dtype=dtype)).square().sum()


# Updates left out in a row, at the smallest scale, after which a run is not going to learn.
HOPELESS = 20


@dataclass(frozen=True)
class LossScale:
    """The factor on a float16 loss that keeps small gradients from vanishing.

    It halves when a gradient overflowed, whose update must be skipped, and doubles after `patience` good steps
    (Micikevicius et al., 2018, arXiv:1710.03740). It does not fall below 1: a gradient that overflows there does so
    without any scaling. `skipped` counts the updates left out so far, `in_a_row` those since the last good step.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    patience: int = 2000
    skipped: int = 0
    in_a_row: int = 0

    def after(self, norm: Tensor) -> LossScale:
        """The scale for the step after one whose global gradient norm was `norm`, which all ranks agree on."""
        if not bool(torch.isfinite(norm)):
            lower = max(self.scale / 2, 1.0)
            return replace(self, scale=lower, good_steps=0, skipped=self.skipped + 1, in_a_row=self.in_a_row + 1)
        if self.good_steps + 1 == self.patience:
            return replace(self, scale=self.scale * 2, good_steps=0, in_a_row=0)
        return replace(self, good_steps=self.good_steps + 1, in_a_row=0)

    @property
    def hopeless(self) -> bool:
        """Whether no smaller scale is left to try and updates keep being skipped."""
        return self.scale == 1.0 and self.in_a_row >= HOPELESS
