"""All ranks compare what they are about to train, before any of them makes a group of the layout."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kumi.config import ResolvedRun
from kumi.errors import LayoutError
from kumi.parallel.mesh import Place


def check_agreement(run: ResolvedRun, place: Place) -> None:
    """Raise LayoutError, on all ranks, unless every rank is to train the same `run` with the same layout."""
    if place.world_size == 1:
        return
    digest = int(run.digest[:15], 16)
    ends = torch.tensor([digest, -digest])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if ends[0] == -ends[1]:
        return
    every: list[dict[str, str]] = [{} for _ in range(place.world_size)]
    dist.all_gather_object(every, run.identity)
    raise LayoutError(_difference(every))


def _difference(every: list[dict[str, str]]) -> str:
    """Return the sentence on the first rank whose part of `every`, by rank, is not that of rank 0."""
    first = every[0]
    rank, other = next((rank, one) for rank, one in enumerate(every) if one != first)
    if other["layout"] != first["layout"]:
        what = f"would train with the layout {other['layout']}, and rank 0 with {first['layout']}"
    else:
        what = f"would train another run than rank 0 ({', '.join(key for key in first if other[key] != first[key])})"
    return f"rank {rank} {what}; start all ranks with the same run file and overrides, on machines of one kind"
