"""One gradient norm over all ranks, and clipping by it.

A rank's loss is the sum over its tokens divided by the token count of the whole step, so gradients are sums over the
data ranks (`kumi.parallel.data` sees to that) and the norm is that of the whole step's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.parallel.mesh import Mesh


def local(tensor: Tensor) -> Tensor:
    """The part of `tensor` that this rank holds, sharing its memory.

    A DTensor is known by its methods: to import the class costs one rank alone half a second of CPU time.
    """
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def is_sharded(tensor: Tensor) -> bool:
    """Whether the dp_shard ranks hold different parts of `tensor`."""
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, mesh: Mesh, *, loss_scale: float = 1.0
) -> Tensor:
    """Scales the gradients of `parameters` to a global norm of at most `max_norm` and returns the norm before clipping.

    Gradients are divided by `loss_scale` first. The norm is a scalar on the gradients' device, float32 (float64 for
    float64 gradients), equal on all ranks; it is not finite when a gradient on any rank is not, and the gradients are
    then of no use. `max_norm` None or 0 clips nothing. One all-reduce where parameters are sharded, none otherwise, and
    on CUDA the host does not wait.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _norm(grads, mesh) / loss_scale
    factor = torch.full_like(norm, 1 / loss_scale)
    if max_norm:
        factor = factor * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if factor.device.type != "cpu" or factor.item() != 1.0:
        torch._foreach_mul_([local(grad) for grad in grads], factor)
    return norm


def _norm(grads: list[Tensor], mesh: Mesh) -> Tensor:
    """The global 2-norm: shards are added up over dp_shard, replicas counted once."""
    parts = [local(grad) for grad in grads if is_sharded(grad)]
    whole = [local(grad) for grad in grads if not is_sharded(grad)]
    square = _square(parts, grads[0].dtype, mesh.device)
    group = mesh.group("dp_shard")
    if parts and group is not None:
        dist.all_reduce(square, group=group)
    return (square + _square(whole, grads[0].dtype, mesh.device)).sqrt()


def _square(tensors: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sum of squares over all of `tensors`, at least in float32."""
    dtype = torch.promote_types(dtype, torch.float32)
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.stack(torch._foreach_norm(filled, 2, dtype=dtype)).square().sum()


@dataclass(frozen=True)
class LossScale:
    """The factor on a float16 loss that keeps small gradients from vanishing.

    It halves when a gradient overflowed, whose step must be skipped, and doubles after `patience` good steps
    (Micikevicius et al., 2018, arXiv:1710.03740).
    """

    scale: float = 2.0**16
    good_steps: int = 0
    patience: int = 2000

    def after(self, norm: Tensor) -> LossScale:
        """The scale for the step after one whose global gradient norm was `norm`, which all ranks agree on."""
        if not bool(torch.isfinite(norm)):
            return LossScale(max(self.scale / 2, 1.0), 0, self.patience)
        if self.good_steps + 1 == self.patience:
            return LossScale(self.scale * 2, 0, self.patience)
        return LossScale(self.scale, self.good_steps + 1, self.patience)
