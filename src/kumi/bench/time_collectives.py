"""Time collectives by kind, size and group, over the backend that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.bench.clock import Work, elapsed_seconds
from kumi.compat import single_tensor_collectives
from kumi.parallel.mesh import Mesh, all_reduce_max, barrier
from kumi.spec.divisibility import divisors

# Bytes of the full tensor. The smallest is dominated by latency, the largest by bandwidth.
_MIN_BYTES, _MAX_BYTES = 2**12, {"cpu": 2**25, "cuda": 2**30}
# The largest and the smallest number of consecutive calls per sample; ranks may be out of step in the first call.
_MAX_CALLS, _MIN_CALLS = 100, 2
# Samples of a case; the median counts.
_SAMPLES = 3


@dataclass(frozen=True)
class CollectiveCase:
    """A collective to time: `kind`, and `size` in bytes of the full tensor (all_to_all: all bytes that a rank sends).

    Consecutive ranks form groups of `degree`. All groups communicate at once, as in training.
    """

    kind: str
    degree: int
    size: int


def cases(world_size: int, device_type: str, *, quick: bool) -> Iterator[CollectiveCase]:
    """Yield the collectives to time: for each group size, `_MIN_BYTES` times powers of 4 (16 if `quick`) up to
    `_MAX_BYTES`. If `quick`, leave out the group sizes between 2 and `world_size`."""
    for degree in divisors(world_size)[1:]:
        if quick and 2 < degree < world_size:
            continue
        for kind in KINDS:
            size = _MIN_BYTES
            while size <= _MAX_BYTES[device_type]:
                yield CollectiveCase(kind, degree, size)
                size *= 16 if quick else 4


def groups(world_size: int, rank: int) -> dict[int, dist.ProcessGroup]:
    """Create this rank's group of every size that divides the world. All ranks must call this together."""
    by_degree: dict[int, dist.ProcessGroup] = {}
    for degree in divisors(world_size)[1:]:
        for first in range(0, world_size, degree):
            group = dist.new_group(list(range(first, first + degree)))
            if first <= rank < first + degree:
                assert group is not None, "a member gets its group"
                by_degree[degree] = group
    return by_degree


def seconds_of_case(case: CollectiveCase, group: dist.ProcessGroup, mesh: Mesh, budget: float) -> float:
    """Return the median seconds of `case` on the slowest rank; all ranks return the same."""
    work = KINDS[case.kind](case.size, group, mesh)
    work()
    calls, seconds = _MIN_CALLS, []
    for _ in range(_SAMPLES):
        barrier(mesh)
        elapsed = torch.tensor(elapsed_seconds(work, calls, mesh.device), dtype=torch.float64)
        seconds.append(float(all_reduce_max(elapsed, mesh)) / calls)
        calls = max(_MIN_CALLS, min(_MAX_CALLS, int(budget / (_SAMPLES * seconds[-1]))))
    return median(seconds)


def _all_reduce(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    full = _full(size, mesh)
    return lambda: dist.all_reduce(full, group=group)


def _all_gather(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    full, shard = _full_and_shard(size, group, mesh)
    gather, _ = single_tensor_collectives()
    return lambda: gather(full, shard, group=group)


def _reduce_scatter(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    full, shard = _full_and_shard(size, group, mesh)
    _, scatter = single_tensor_collectives()
    return lambda: scatter(shard, full, group=group)


def _all_to_all(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    sent, _ = _full_and_shard(size, group, mesh)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _send(size: int, group: dist.ProcessGroup, mesh: Mesh) -> Work:
    """Send from each even rank to the next odd one. In a group of odd size, the last rank does nothing."""
    full, rank, group_size = _full(size, mesh), group.rank(), group.size()
    peer = dist.get_global_rank(group, min(rank ^ 1, group_size - 1))
    if rank ^ 1 >= group_size:
        return lambda: None
    if rank % 2 == 0:
        return lambda: dist.send(full, peer, group=group)
    return lambda: dist.recv(full, peer, group=group)


KINDS: dict[str, Callable[[int, dist.ProcessGroup, Mesh], Work]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _send,
}


def _full(size: int, mesh: Mesh) -> Tensor:
    return torch.zeros(size // 4, device=mesh.device)


def _full_and_shard(size: int, group: dist.ProcessGroup, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return a tensor of about `size` bytes, and one rank's shard of it. All shards have the same size."""
    count = size // 4 // group.size()
    return torch.zeros(count * group.size(), device=mesh.device), torch.zeros(count, device=mesh.device)
