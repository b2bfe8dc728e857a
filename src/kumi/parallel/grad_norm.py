"""The gradient norm over all ranks, gradient clipping, and the loss scale of float16.

A rank's loss is the sum over its tokens, divided by the token count of the step. `kumi.parallel.data_parallel` sums the
gradients over the data-parallel ranks, so the norm is that of the step's gradient.

Replicated shards are counted once: a rank divides the squares of a shard by the number of ranks that have this shard
among those whose squares are added up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import local_shard, params_by_name, unwrap
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.process_groups import has_sharded_grads
from kumi.spec.shard_slices import replica_axes, tied_axes


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float | None, mesh: Mesh, *, loss_scale: float = 1.0) -> Tensor:
    """Clip the gradients of `model` to a global norm of at most `max_norm`, and return the norm before clipping.

    Gradients are divided by `loss_scale` first. `max_norm` None or 0 does not clip. The norm is a scalar on the mesh's
    device, float32 (float64 for float64 gradients), and the same on all ranks. If a gradient on any rank is not finite,
    neither is the norm, and the gradients must not be used. Ranks with different shards communicate by one all-reduce.
    On CUDA the host does not wait for the device.
    """
    named = [(name, value.grad) for name, value in model.named_parameters() if value.grad is not None]
    norm = _norm([(name.removeprefix("module."), grad) for name, grad in named], model, mesh) / loss_scale
    factor = torch.full_like(norm, 1 / loss_scale)
    if max_norm:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if named and not _scales_nothing(factor):
        grads = [local_shard(grad) for _, grad in named]
        torch._foreach_mul_(grads, factor.to(grads[0].device))  # gradients may be offloaded to the host
    return norm


def _scales_nothing(factor: Tensor) -> bool:
    """Return True if `factor` is 1 and on the CPU; False for a factor on a GPU, for which the host would have to
    wait."""
    return factor.device.type == "cpu" and factor.item() == 1.0


def _norm(grads: list[tuple[str, Tensor]], model: nn.Module, mesh: Mesh) -> Tensor:
    """Return the global 2-norm."""
    group = _norm_group(mesh)
    spec: Any = None if group is None else unwrap(model).spec
    params = {} if spec is None else params_by_name(spec)
    by_replicas: dict[int, list[Tensor]] = defaultdict(list)
    for name, grad in grads:
        by_replicas[_replicas(spec, params[name], mesh.layout) if spec else 1].append(local_shard(grad))
    dtype = torch.promote_types(grads[0][1].dtype, torch.float32) if grads else torch.float32
    square = torch.zeros((), dtype=dtype, device=mesh.device)
    for count, shards in sorted(by_replicas.items()):
        square += _sum_of_squares(shards, dtype, mesh.device) / count
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def _norm_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group that sums the squares; None if every rank has all gradients."""
    return mesh.group("norm") if has_sharded_grads(mesh.layout) else None


@lru_cache(maxsize=4096)
def _replicas(spec: ModelSpec, param: Param, layout: Layout) -> int:
    """Return the number of ranks in the norm's group that have the same shard of `param`."""
    axes = (*replica_axes(param, layout), *tied_axes(spec, param, layout))
    # The norm's group does not extend over dp_replicate.
    return prod(axis.degree for axis in axes if axis.name != "dp_replicate")


def _sum_of_squares(tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the sum of squares of all elements of `tensors`, a scalar."""
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack(torch._foreach_norm(nonempty, 2, dtype=dtype)).square().sum()


# A run is hopeless after this many consecutive skipped updates at the smallest scale.
HOPELESS_SKIPS = 20


@dataclass(frozen=True)
class LossScale:
    """The factor of a float16 loss that keeps small gradients from underflowing.

    It halves after a gradient overflow, for which the update must be skipped, and doubles after `patience` good steps
    (Micikevicius et al., 2018, arXiv:1710.03740). It does not fall below 1, which is no scaling.

    `good_steps`: consecutive steps without overflow since the scale last changed.
    `skipped`: updates skipped so far.
    `in_a_row`: updates skipped since the last good step.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    patience: int = 2000
    skipped: int = 0
    in_a_row: int = 0

    def after(self, norm: Tensor) -> LossScale:
        """Return the scale of the next step, after a step with the global gradient norm `norm`, which is the same on
        all ranks."""
        if not bool(torch.isfinite(norm)):
            lower = max(self.scale / 2, 1.0)
            return replace(self, scale=lower, good_steps=0, skipped=self.skipped + 1, in_a_row=self.in_a_row + 1)
        if self.good_steps + 1 == self.patience:
            return replace(self, scale=self.scale * 2, good_steps=0, in_a_row=0)
        return replace(self, good_steps=self.good_steps + 1, in_a_row=0)

    @property
    def hopeless(self) -> bool:
        """True if the scale is the smallest and updates are still skipped."""
        return self.scale == 1.0 and self.in_a_row >= HOPELESS_SKIPS
