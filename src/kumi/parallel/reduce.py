"""Gradients summed over groups of ranks after the last backward, many in one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Bytes of a message: large enough for full bandwidth, small beside the gradients.
BUCKET = 64 * 2**20


@torch.no_grad()
def sum_over(grads: Sequence[Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None) -> None:
    """Sums each of `grads` over `group`, in place, travelling in `dtype` (None: their own). None: nothing to sum.

    All ranks of the group must give tensors of the same shapes in the same order.
    """
    if group is None or not grads:
        return
    works = []
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1).to(dtype or grad.dtype) for grad in bucket])
        works.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in works:
        assert work is not None
        work.wait()
        for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view(grad.shape))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`grads` in order, in runs of one dtype and about `BUCKET` bytes."""
    bucket: list[Tensor] = []
    for grad in grads:
        full = sum(one.nbytes for one in bucket) + grad.nbytes > BUCKET
        if bucket and (full or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket
