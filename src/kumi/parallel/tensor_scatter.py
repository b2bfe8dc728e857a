"""Reduce-scatter of a single tensor. Over gloo it is an all-to-all, whose parts each rank sums.

gloo has no reduce-scatter: PyTorch all-reduces a copy of the input and takes a part of it, which sends twice the bytes.
Both need a copy of the input. Other backends have a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.compat import single_tensor_collectives


def scatter_sum(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Write this rank's rows (N, ..) of the sum of `x` (n N, ..) over the n ranks of `group` to `out`.

    Both are contiguous. Over gloo, the ranks' terms are added in the order of ranks. On two ranks, the sums are bitwise
    those of gloo's all-reduce.
    """
    if not uses_gloo(x.device, group):
        single_tensor_collectives()[1](out, x, group=group)
        return
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    first, second, *others = received.view(group.size(), *out.shape)
    torch.add(first, second, out=out)
    for part in others:
        out.add_(part)


def uses_gloo(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return True if the ranks of `group` send tensors on `device` by gloo."""
    return device.type == "cpu" and dist.get_backend(group) == "gloo"


class FsdpReduceScatter:
    """`reduce_scatter` for `FSDPModule.set_custom_reduce_scatter`."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        scatter_sum(output_tensor, input_tensor, group)
