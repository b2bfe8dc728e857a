"""DualPipe (DeepSeek-V3, 2024, arXiv:2412.19437) folded into a V, so that each rank has one copy of its weights.

The steady phase alternates a forward and a full backward of the other direction. The computation of each can hide the
messages of the other.
"""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import ArrayNamespace, PipelineTimes, RankProgram, Schedule
from kumi.spec.schedules.v_shape import DOWN, UP, transfer_delay


def program(rank: int, pp: int, stages: int, microbatches: int) -> RankProgram:
    """Return the actions (kind, chunk) of `rank` in a step: F forward, B backward, I input and W weight gradient."""
    # The number of ranks between this one and the bottom of the V, and from the top to this one, itself included.
    far, pair = pp - 1 - rank, rank + 1
    warmup = (*(("F", DOWN),) * (2 * far), *(("F", DOWN), ("F", UP)) * pair, *(("I", UP), ("W", UP), ("F", UP)) * far)
    steady = (("F", DOWN), ("B", UP), ("F", UP), ("B", DOWN))
    alternate = tuple(("B" if index < pair else "I", (UP, DOWN)[index % 2]) for index in range(2 * pair))
    late = [*(chunk for kind, chunk in alternate if kind == "I"), *[DOWN] * far]
    between = tuple(token for chunk in late[:far] for token in (("W", chunk), ("I", DOWN)))
    cooldown = (*steady[1:] * far, *alternate, *between, *(("W", chunk) for chunk in late[far:]))
    return RankProgram(warmup, steady, microbatches - 2 * pp + pair, cooldown)


def in_flight(xp: ArrayNamespace, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    """Return the peak number of (microbatch, stage) pairs with live activations on `rank`."""
    return xp.minimum(2 * microbatches, 2 * pp + 1)


def bubble(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds of a step beyond the work of the busiest rank.

    A path counts forwards, input gradients, weight gradients and transfers; q is the number of other ranks.
    """
    q = x.other_ranks
    paths = [
        (q, 0, 0, 3 * q),
        (q, q, -q, 4 * q),
        (-1, 2 * q, -q, 6 * q),
        (-1, q, 0, 5 * q),
        (2 * q, -q, -q, 3 * q),
        (2 * q, 0, -2 * q, 4 * q),
    ]
    return x.critical_path(xp, paths) + transfer_delay(xp, x)


SCHEDULE = Schedule(program, in_flight, bubble, stages=2, v_shaped=True, splits_backward=True, least_per_rank=2)
