"""Reduce-scatter over gloo: an all-to-all, and sums that are those of PyTorch's own reduce-scatter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from kumi.compat import single_tensor_collectives
from kumi.parallel import tensor_scatter
from watch import Sent


def _sums(dtype, rows, columns):
    """Return this rank's rows of the sum by `reduce_scatter` and by PyTorch, and the messages of the first."""
    size = dist.get_world_size()
    random = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(size * rows, columns, generator=random).to(dtype)
    ours, theirs = (torch.full((rows, columns), 7, dtype=dtype) for _ in range(2))
    before = x.clone()
    tensor_scatter.scatter_sum(ours, x, dist.group.WORLD)
    assert torch.equal(x, before)
    single_tensor_collectives()[1](theirs, x, group=dist.group.WORLD)
    with Sent() as watch:
        tensor_scatter.scatter_sum(ours, x, dist.group.WORLD)
    return ours, theirs, dict(watch.seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("world_size", "rows", "columns"), [(2, 5, 3), (4, 1, 7), (3, 2, 0)])
def test_rows_of_the_sum(ranks, world_size, rows, columns, dtype):
    for ours, theirs, messages in ranks(world_size, _sums, dtype, rows, columns):
        assert torch.allclose(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
        assert world_size > 2 or torch.equal(ours, theirs)
        assert messages == {("reduce_scatter", world_size, world_size * rows * columns * dtype.itemsize): 1}
