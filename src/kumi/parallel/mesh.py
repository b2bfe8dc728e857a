"""Ranks: where this one stands, and the groups they talk in.

place = init_distributed("cuda")            # reads what torchrun set; one process alone has no group at all
mesh = build_mesh(layout, place)            # the groups of this rank; mesh.alone for one process
total(tensor, mesh)                         # sum over all ranks, in place
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kumi.errors import CommunicationError, LayoutError
from kumi.spec.layout import AXES, Layout
from kumi.spec.process_groups import COMBINED_AXES, EXPERT_AXES, axis, members_of

# CPU tensors (flags, counts, checkpoint metadata) travel over gloo beside NCCL.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

# Groups that stretch over several axes, and stages once more, for what they send back.
TOGETHER = {**COMBINED_AXES, "pp_back": ("pp",)}
NAMES = (*AXES, "zero", *EXPERT_AXES, *TOGETHER)
# A group of GPUs does one thing after the other. What should go on at the same time has groups of its own there:
# weights that are gathered and gradients that are summed beside what layers exchange, and the gradients that stages
# send opposite to their activations.
BESIDE = {"weights": ("dp_replicate", "dp_shard", "zero", "expert_dp", "data", "expert_data"), "back": ("pp_back",)}


@dataclass(frozen=True)
class Place:
    """One rank of the run and the device it computes on. `local_rank` counts within the node. A collective that takes
    longer than `timeout_s` fails."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    timeout_s: float = 600.0


@dataclass(frozen=True)
class Mesh:
    """The layout laid over the ranks: this rank's groups by their names in `NAMES`, those of more than one rank."""

    layout: Layout
    place: Place
    groups: Mapping[str, dist.ProcessGroup]

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def alone(self) -> bool:
        """Whether this process is the only one."""
        return self.place.world_size == 1

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The ranks that this one talks to along the axis `name`, itself included; None when it is the only one."""
        return self.groups.get(name)

    def index(self, name: str) -> int:
        """Where this rank stands on the axis `name`."""
        return axis(self.layout, name).index(self.rank)

    def device_mesh(self, *names: str) -> DeviceMesh | None:
        """The axes `names` as FSDP2 wants them, those of degree 1 left out; None when none is left."""
        kept = [name for name in names if name in self.groups]
        if not kept:
            return None
        members = torch.tensor(members_of(self.layout, kept, self.rank))
        sizes = [axis(self.layout, name).degree for name in kept]
        groups = [self.groups[name] for name in kept]
        kind = self.device.type
        if len(kept) == 1:
            return DeviceMesh.from_group(groups[0], kind, mesh=members, mesh_dim_names=tuple(kept))
        return DeviceMesh.from_group(groups, kind, mesh=members.view(sizes), mesh_dim_names=tuple(kept))


def init_distributed(device_type: str = "cpu", *, timeout_s: float = 600.0) -> Place:
    """Joins the ranks that the launcher started and returns where this one stands.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without WORLD_SIZE, or with 1, no group is made.
    A collective that takes longer than `timeout_s` fails. Raises CommunicationError when the ranks do not meet, and
    LayoutError when this machine has no GPU for this rank.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        _check_local_rank(rank, world_size)
        torch.cuda.set_device(device)
        # Stages send one message after the other in a group for each direction, as they should.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
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
    return Place(rank, world_size, local_rank, device, timeout_s)


def _check_local_rank(rank: int, world_size: int) -> None:
    """Raise LayoutError unless this rank knows its GPU and the machine has it."""
    named = os.environ.get("LOCAL_RANK", "0" if world_size == 1 else None)
    if named is None:
        raise LayoutError(
            f"rank {rank} of {world_size} does not know its GPU: the environment has no LOCAL_RANK, nor what srun or "
            f"mpirun set instead (SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK); set LOCAL_RANK to its number on its node"
        )
    if int(named) >= (count := torch.cuda.device_count()):
        raise LayoutError(
            f"LOCAL_RANK={named} and this machine shows {count} GPUs: start at most {count} ranks on it, or show it "
            f"more (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}, srun's --gpus-per-node)"
        )


def close_distributed() -> None:
    """Leave the group, if there is one. Not after a failure: NCCL waits there for what others have not sent."""
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
    return Mesh(layout, place, _groups(layout, place))


def _groups(layout: Layout, place: Place) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank. Only the members of a group make it, so that thousands of ranks take no longer than a
    few; but all ranks make equally many, in the same order, since NCCL splits each off the group of all ranks, which
    all must take part in. Axes with the same members share a group, but for those that GPUs use `BESIDE` others."""
    made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    found = {}
    for name in NAMES:
        members = members_of(layout, TOGETHER.get(name, (name,)), place.rank)
        if len(members) > 1:
            key = _use(name) if place.device.type == "cuda" else "", members
            if key not in made:
                every = dist.group.WORLD if len(members) == place.world_size else None
                made[key] = new_group(members, place) if every is None or every in made.values() else every
            found[name] = made[key]
    return found


def _use(name: str) -> str:
    return next((use for use, names in BESIDE.items() if name in names), "")


def new_group(members: Sequence[int], place: Place) -> dist.ProcessGroup:
    """A group of `members`, one of them this rank, that waits as long as the group of all ranks. All ranks must make
    one at the same time."""
    timeout = timedelta(seconds=place.timeout_s)  # PyTorch's own would be 30 minutes
    group: dist.ProcessGroup = dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
    return group


def total(tensor: Tensor, mesh: Mesh) -> Tensor:
    """`tensor` summed over all ranks, in place where it is contiguous."""
    return _reduce(tensor, mesh, dist.ReduceOp.SUM)


def greatest(tensor: Tensor, mesh: Mesh) -> Tensor:
    """The element-wise maximum of `tensor` over all ranks, in place where it is contiguous."""
    return _reduce(tensor, mesh, dist.ReduceOp.MAX)


def counts_once(mesh: Mesh) -> bool:
    """Whether this rank speaks for all that read the same sequences, of whom one is counted."""
    return all(mesh.index(name) == 0 for name in ("pp", "cp", "tp"))


def _reduce(tensor: Tensor, mesh: Mesh, op: dist.ReduceOp.RedOpType) -> Tensor:
    if mesh.alone:
        return tensor
    tensor = tensor.contiguous()  # gloo ignores strides without an error
    dist.all_reduce(tensor, op=op)
    return tensor


def barrier(mesh: Mesh) -> None:
    """Returns once every rank has come here."""
    if not mesh.alone:
        total(torch.zeros(()), mesh)
