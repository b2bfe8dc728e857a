"""Which ranks there are, where this one stands, and the groups they talk in.

place = init_distributed("cuda")            # reads what torchrun set; one process alone has no group at all
mesh = build_mesh(layout, place)            # named axes; mesh.axes is None for one process
total(tensor, mesh)                         # sum over the data-parallel ranks, in place
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kumi.errors import CommunicationError, LayoutError
from kumi.spec.layout import AXES, Layout

# CPU tensors (flags, counts, checkpoint metadata) travel over gloo beside NCCL.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class Place:
    """One rank of the run and the device it computes on. `local_rank` counts within the node."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


@dataclass(frozen=True)
class Mesh:
    """The layout laid over the ranks. `axes` has the axes of degree > 1, outer to inner; None for one process."""

    layout: Layout
    place: Place
    axes: DeviceMesh | None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def device(self) -> torch.device:
        return self.place.device

    def axis(self, *names: str) -> DeviceMesh | None:
        """The part of the mesh with the axes `names`, those of degree 1 left out; None when none is left."""
        if self.axes is None or self.axes.mesh_dim_names is None:
            return None
        kept = tuple(name for name in names if name in self.axes.mesh_dim_names)
        return self.axes[kept] if kept else None

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The group of ranks that this one talks to along the axis `name`; None when its degree is 1."""
        axis = self.axis(name)
        return None if axis is None else axis.get_group()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that see different sequences; None for one process. The only axes so far are the data axes."""
        return None if self.axes is None else dist.group.WORLD


def init_distributed(device_type: str = "cpu", *, timeout_s: float = 600.0) -> Place:
    """Joins the ranks that the launcher started and returns where this one stands.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without WORLD_SIZE, or with 1, no group is made.
    A collective that takes longer than `timeout_s` fails. Raises CommunicationError when the ranks do not meet.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        try:
            dist.init_process_group(
                BACKENDS[device.type],
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
        except dist.DistError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise CommunicationError(
                f"rank {rank} of {world_size} could not meet the others at {where} within {timeout_s:.0f} s ({error}); "
                f"check that all ranks run and that the address can be reached"
            ) from error
    return Place(rank, world_size, local_rank, device)


def close_distributed() -> None:
    """Leaves the group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(layout: Layout, place: Place) -> Mesh:
    """The mesh of `layout`. Every rank must call it. Raises LayoutError when the degrees do not make the world size."""
    if layout.world_size != place.world_size:
        degrees = " x ".join(f"{name} {getattr(layout, name)}" for name in AXES)
        raise LayoutError(
            f"the layout needs {layout.world_size} ranks ({degrees}), {place.world_size} were started; "
            f"start {layout.world_size} or change the layout"
        )
    names = [name for name in AXES if getattr(layout, name) > 1]
    if not names:
        return Mesh(layout, place, None)
    shape = tuple(getattr(layout, name) for name in names)
    return Mesh(layout, place, init_device_mesh(place.device.type, shape, mesh_dim_names=tuple(names)))


def total(tensor: Tensor, mesh: Mesh) -> Tensor:
    """`tensor` summed over the data-parallel ranks, in place where it is contiguous."""
    return _reduce(tensor, mesh, dist.ReduceOp.SUM)


def greatest(tensor: Tensor, mesh: Mesh) -> Tensor:
    """The element-wise maximum of `tensor` over the data-parallel ranks, in place where it is contiguous."""
    return _reduce(tensor, mesh, dist.ReduceOp.MAX)


def _reduce(tensor: Tensor, mesh: Mesh, op: dist.ReduceOp.RedOpType) -> Tensor:
    if mesh.data_group is None:
        return tensor
    tensor = tensor.contiguous()  # gloo ignores strides without an error
    dist.all_reduce(tensor, op=op, group=mesh.data_group)
    return tensor


def barrier(mesh: Mesh) -> None:
    """Returns once every rank has come here."""
    if mesh.axes is not None:
        total(torch.zeros(()), mesh)
