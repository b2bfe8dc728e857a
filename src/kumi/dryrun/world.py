"""One rank of a world of any size, in a process of its own: nobody else is there, and what is sent goes nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from kumi.compat import join_fake_world
from kumi.errors import RefusedError
from kumi.parallel.mesh import Mesh, Place, build_mesh, close_distributed
from kumi.spec.layout import Layout


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[Mesh]:
    """The mesh of `rank` in a world as large as `layout` says, on the CPU. Collectives return at once what is there."""
    if dist.is_initialized():
        raise RefusedError("a dry run needs a process without a process group; start it by itself")
    if layout.world_size > 1:
        join_fake_world(rank, layout.world_size)
    try:
        yield build_mesh(layout, Place(rank, layout.world_size, 0, torch.device("cpu")))
    finally:
        close_distributed()
