"""Compare the runs of all ranks, before any rank makes the layout's process groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kumi.config import ResolvedRun
from kumi.errors import LayoutError
from kumi.parallel.mesh import RankInfo


def check_agreement(run: ResolvedRun, place: RankInfo) -> None:
    """Raise LayoutError, on all ranks, unless every rank has the same `run` and layout."""
    if place.world_size == 1:
        return
    digest = int(run.digest[:15], 16)
    extremes = torch.tensor([digest, -digest])  # after the reduction: the largest digest, and minus the smallest one
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes[0] == -extremes[1]:
        return
    identities: list[dict[str, str]] = [{} for _ in range(place.world_size)]
    dist.all_gather_object(identities, run.identity)
    raise LayoutError(_difference(identities))


def _difference(identities: list[dict[str, str]]) -> str:
    """Return the error message for the first rank that differs from rank 0. `identities`: the run of each rank."""
    first = identities[0]
    rank, other = next((rank, identity) for rank, identity in enumerate(identities) if identity != first)
    if other["layout"] != first["layout"]:
        difference = f"would train with the layout {other['layout']}, and rank 0 with {first['layout']}"
    else:
        keys = ", ".join(key for key in first if other[key] != first[key])
        difference = f"would train another run than rank 0 (different: {keys})"
    return f"rank {rank} {difference}; start all ranks with the same run file and overrides, on machines of one kind"
