"""How long collectives take, by kind, size and group, over the backend that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.bench.clock import Work, lasting
from kumi.compat import one_tensor_collectives
from kumi.parallel.mesh import Mesh, barrier, greatest
from kumi.spec.checks import divisors

# Bytes of the whole tensor. The smallest is all latency, the largest all bandwidth.
LEAST, MOST = 2**12, {"cpu": 2**25, "cuda": 2**30}
# Calls in a row that make a sample, at most; and at least, since the first ones of a row may find ranks apart.
_MOST_CALLS, _LEAST_CALLS, _SAMPLES = 100, 2, 3


@dataclass(frozen=True)
class Message:
    """A collective of `kind` over `size` bytes (the whole tensor; of all_to_all, what one rank sends in all).

    Consecutive ranks form groups of `degree`, all of which communicate at once, as in training.
    """

    kind: str
    degree: int
    size: int


def messages(world_size: int, device_type: str, *, quick: bool) -> Iterator[Message]:
    """Every collective to time: for each group size, powers of four (16 where `quick`) from LEAST to MOST bytes."""
    for degree in divisors(world_size)[1:]:
        if quick and 2 < degree < world_size:
            continue
        for kind in KINDS:
            size = LEAST
            while size <= MOST[device_type]:
                yield Message(kind, degree, size)
                size *= 16 if quick else 4


def groups(world_size: int, rank: int) -> dict[int, dist.ProcessGroup]:
    """This rank's group of every size that divides the world. All ranks must call it together."""
    mine: dict[int, dist.ProcessGroup] = {}
    for degree in divisors(world_size)[1:]:
        for first in range(0, world_size, degree):
            group = dist.new_group(list(range(first, first + degree)))
            if first <= rank < first + degree:
                assert group is not None, "a member gets its group"
                mine[degree] = group
    return mine


def seconds_of_message(message: Message, group: dist.ProcessGroup, mesh: Mesh, budget: float) -> float:
    """Median seconds of one `message`, the same on all ranks: that of the rank that took longest."""
    work = KINDS[message.kind](message.size, group, mesh)
    work()
    calls, seconds = _LEAST_CALLS, []
    for _ in range(_SAMPLES):
        barrier(mesh)
        taken = torch.tensor(lasting(work, calls, mesh.device), dtype=torch.float64)
        seconds.append(float(greatest(taken, mesh)) / calls)
        calls = max(_LEAST_CALLS, min(_MOST_CALLS, int(budget / (_SAMPLES * seconds[-1]))))
    return median(seconds)


def _all_reduce(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    whole = _whole(size, mesh)
    return lambda: dist.all_reduce(whole, group=group)


def _all_gather(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    whole, part = _whole_and_part(size, group, mesh)
    gather, _ = one_tensor_collectives()
    return lambda: gather(whole, part, group=group)


def _reduce_scatter(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    whole, part = _whole_and_part(size, group, mesh)
    _, scatter = one_tensor_collectives()
    return lambda: scatter(part, whole, group=group)


def _all_to_all(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    sent, _ = _whole_and_part(size, group, mesh)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _send(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    """Ranks stand in pairs: the even one sends to the odd one. The last of an odd number looks on."""
    whole, rank, size_of_group = _whole(size, mesh), group.rank(), group.size()
    other = dist.get_global_rank(group, min(rank ^ 1, size_of_group - 1))
    if rank ^ 1 >= size_of_group:
        return lambda: None
    if rank % 2 == 0:
        return lambda: dist.send(whole, other, group=group)
    return lambda: dist.recv(whole, other, group=group)


KINDS: dict[str, Callable[[int, dist.ProcessGroup, Mesh], Work]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}


def _whole(size: int, mesh: Mesh) -> Tensor:
    return torch.zeros(size // 4, device=mesh.device)


def _whole_and_part(size: int, group: dist.ProcessGroup, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """About `size` bytes, and the equal part of them that each rank of the group has."""
    count = size // 4 // group.size()
    return torch.zeros(count * group.size(), device=mesh.device), torch.zeros(count, device=mesh.device)
