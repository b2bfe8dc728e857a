"""The ranks of a run and their process groups.

rank_info = init_distributed("cuda")        # from the launcher's environment; a single process has no groups
mesh = build_mesh(layout, rank_info)        # the groups of this rank; mesh.is_single for a single process
all_reduce_sum(tensor, mesh)                # sum over all ranks, in place
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kumi.accelerator import is_gpu
from kumi.errors import CommunicationError, LayoutError
from kumi.spec.layout import AXES, Layout
from kumi.spec.pipeline_channels import pipeline_channels
from kumi.spec.process_groups import COMBINED_AXES, EXPERT_AXES, axis, members_of

T = TypeVar("T")

# With NCCL, CPU tensors (flags, counts, checkpoint metadata) are sent by gloo.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

# The layout's axes; "zero" (dp_shard and cp together); the axes of routed experts; combinations of axes such as "data".
GROUP_NAMES = (*AXES, "zero", *EXPERT_AXES, *COMBINED_AXES)
# The groups that only routed experts need.
_EXPERT_GROUPS = (*EXPERT_AXES, "expert_data")
# NCCL runs the operations of a communicator one after the other. On GPUs, operations that should overlap have separate
# communicators: the weights' all-gathers and the gradients' reductions overlap with the collectives inside layers. The
# messages between stages have a group for each channel (see `kumi.spec.pipeline_channels`).
SEPARATE_COMMUNICATORS = {"weights": ("dp_replicate", "dp_shard", "zero", "expert_dp", "data", "expert_data")}


@dataclass(frozen=True)
class RankInfo:
    """This process: its rank in the run and its device.

    `local_rank`: index of the rank in its node.
    `timeout_s`: a collective that takes longer fails.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Mesh:
    """The process groups of this rank in a layout.

    `groups`: the process groups of more than one rank, by their names in `GROUP_NAMES`; on GPUs, also those of the
    channels between pipeline stages, by the channels' names.
    """

    layout: Layout
    rank_info: RankInfo
    groups: Mapping[str, dist.ProcessGroup]

    @property
    def rank(self) -> int:
        """The rank of this process among all ranks of the run."""
        return self.rank_info.rank

    @property
    def device(self) -> torch.device:
        return self.rank_info.device

    @property
    def is_single(self) -> bool:
        """True if this process is the only one."""
        return self.rank_info.world_size == 1

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return the process group of this rank along the axis `name`; None if the axis has degree 1."""
        return self.groups.get(name)

    def index(self, name: str) -> int:
        """Return the index of this rank on the axis `name`."""
        return axis(self.layout, name).index(self.rank)

    def device_mesh(self, *names: str) -> DeviceMesh | None:
        """Return the DeviceMesh of the axes `names` for FSDP2, without those of degree 1; None if all have degree 1."""
        axes = [name for name in names if name in self.groups]
        if not axes:
            return None
        members = torch.tensor(members_of(self.layout, axes, self.rank))
        sizes = [axis(self.layout, name).degree for name in axes]
        groups = [self.groups[name] for name in axes]
        kind = self.device.type
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], kind, mesh=members, mesh_dim_names=tuple(axes))
        return DeviceMesh.from_group(groups, kind, mesh=members.view(sizes), mesh_dim_names=tuple(axes))


def init_distributed(device_type: str = "cpu", *, timeout_s: float = 600.0) -> RankInfo:
    """Join the world group of the launcher's ranks, and return this rank.

    Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; make no group without WORLD_SIZE, or if it is 1. A
    collective that takes longer than `timeout_s` fails. Raise CommunicationError if the ranks do not meet, and
    LayoutError if this machine has no GPU for this rank.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if is_gpu(device):
        _check_local_rank(rank, world_size)
        torch.cuda.set_device(device)
        # Silence a warning: the messages of a channel are sent one after the other, as intended.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    if world_size > 1 and not dist.is_initialized():
        try:
            dist.init_process_group(
                _BACKENDS[device.type],
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if is_gpu(device) else None,
            )
        except dist.DistError as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise CommunicationError(
                f"rank {rank} of {world_size} could not meet the others at {address} within {timeout_s:.0f} s "
                f"({error}); check that all ranks run and that the address can be reached"
            ) from error
    return RankInfo(rank, world_size, local_rank, device, timeout_s)


def _check_local_rank(rank: int, world_size: int) -> None:
    """Raise LayoutError unless this rank knows its GPU and the machine has it."""
    named = os.environ.get("LOCAL_RANK", "0" if world_size == 1 else None)
    if named is None:
        raise LayoutError(
            f"rank {rank} of {world_size} does not know its GPU: the environment has neither LOCAL_RANK nor srun's "
            f"SLURM_LOCALID nor mpirun's OMPI_COMM_WORLD_LOCAL_RANK; set LOCAL_RANK to the rank's number on its node"
        )
    if int(named) >= (count := torch.cuda.device_count()):
        raise LayoutError(
            f"LOCAL_RANK={named} and this machine shows {count} GPUs: start at most {count} ranks on it, or make more "
            f"visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}, srun's --gpus-per-node)"
        )


def close_distributed() -> None:
    """Destroy the process groups, if any. Do not call it after a failure: NCCL would wait for missing messages."""
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(layout: Layout, rank_info: RankInfo, *, experts: bool = True) -> Mesh:
    """Return the mesh of `layout`.

    Every rank must call it. `experts`: make the groups of routed experts, which only a model with experts needs. Raise
    LayoutError if layout and run differ in world size.
    """
    if layout.world_size != rank_info.world_size:
        degrees = " x ".join(f"{name} {getattr(layout, name)}" for name in AXES)
        raise LayoutError(
            f"the layout needs {layout.world_size} ranks ({degrees}), {rank_info.world_size} were started; "
            f"start {layout.world_size} or change the layout"
        )
    return Mesh(layout, rank_info, _groups(layout, rank_info, experts=experts))


def _groups(layout: Layout, rank_info: RankInfo, *, experts: bool) -> dict[str, dist.ProcessGroup]:
    """Return the groups of this rank by name.

    Only the members of a group make it, so thousands of ranks take no longer than a few. All ranks make equally many
    groups in the same order, because NCCL splits each off the world group, and all ranks must take part in that. Axes
    with the same members share a group, except `SEPARATE_COMMUNICATORS` and the channels of a pipeline on GPUs.
    """
    made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    groups, on_gpu = {}, is_gpu(rank_info.device)
    for name in GROUP_NAMES:
        members = members_of(layout, COMBINED_AXES.get(name, (name,)), rank_info.rank)
        if len(members) > 1 and (experts or name not in _EXPERT_GROUPS):
            key = _communicator(name) if on_gpu else "", members
            if key not in made:
                world = dist.group.WORLD if len(members) == rank_info.world_size else None
                made[key] = new_group(members, rank_info, layout) if world is None or world in made.values() else world
            groups[name] = made[key]
    if on_gpu and layout.pp > 1:
        members = members_of(layout, ("pp",), rank_info.rank)
        for channel in pipeline_channels(layout.schedule, layout.pp, layout.stages):
            groups[channel] = new_group(members, rank_info, layout)
    return groups


def _communicator(name: str) -> str:
    """Return the use of `SEPARATE_COMMUNICATORS` that the group `name` has; "" for the communicators inside layers."""
    return next((use for use, names in SEPARATE_COMMUNICATORS.items() if name in names), "")


def new_group(members: Sequence[int], rank_info: RankInfo, layout: Layout) -> dist.ProcessGroup:
    """Return a new group of `members`, among them this rank. All ranks must make a group at the same time.

    On GPUs the group has no gloo, whose ranks would each connect to each other: only the world group carries CPU
    tensors, unless the states of `layout` are on the host.
    """
    only_nccl = is_gpu(rank_info.device) and not layout.offload.startswith("states")
    group: dist.ProcessGroup = dist.new_group(
        list(members),
        timeout=timedelta(seconds=rank_info.timeout_s),  # PyTorch's default is 30 minutes
        backend="nccl" if only_nccl else None,
        use_local_synchronization=True,
    )
    return group


def all_reduce_sum(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return `tensor` summed over all ranks, in place if it is contiguous."""
    return _reduce(tensor, mesh, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor, mesh: Mesh) -> Tensor:
    """Return the element-wise maximum of `tensor` over all ranks, in place if it is contiguous."""
    return _reduce(tensor, mesh, dist.ReduceOp.MAX)


def is_loss_rank(mesh: Mesh) -> bool:
    """Return True on one rank (pp = cp = tp = 0) of each group of ranks with the same sequences."""
    return all(mesh.index(name) == 0 for name in ("pp", "cp", "tp"))


def _reduce(tensor: Tensor, mesh: Mesh, op: dist.ReduceOp.RedOpType) -> Tensor:
    """Return `tensor` reduced by `op` over all ranks."""
    if mesh.is_single:
        return tensor
    tensor = tensor.contiguous()  # gloo ignores strides without an error
    dist.all_reduce(tensor, op=op)
    return tensor


def barrier(mesh: Mesh) -> None:
    """Return once every rank has called this function."""
    if not mesh.is_single:
        all_reduce_sum(torch.zeros(()), mesh)


def broadcast_object(value: T, mesh: Mesh) -> T:
    """Return `value` of rank 0 on every rank. The ranks of a run trust each other, so pickling is safe."""
    if mesh.is_single:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def gather_objects(value: T, mesh: Mesh) -> list[T]:
    """Return the values of all ranks, by rank, on every rank."""
    values = [value] * mesh.rank_info.world_size
    if not mesh.is_single:
        dist.all_gather_object(values, value)
    return values
