"""A fake process group: one process acts as one rank of a world of any size, and its messages go nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from kumi.compat import join_fake_world
from kumi.errors import RefusedError
from kumi.parallel.mesh import Mesh, RankInfo, build_mesh, close_distributed
from kumi.spec.layout import Layout


@contextmanager
def fake_rank(layout: Layout, rank: int) -> Iterator[Mesh]:
    """Yield the CPU mesh of `rank` in a fake world of the layout's size; collectives return at once, without data.

    Raise RefusedError if the process already has a process group.
    """
    if dist.is_initialized():
        raise RefusedError("dry run: this process already has a process group; start the dry run in its own process")
    if layout.world_size > 1:
        join_fake_world(rank, layout.world_size)
    try:
        yield build_mesh(layout, RankInfo(rank, layout.world_size, 0, torch.device("cpu")))
    finally:
        close_distributed()
