"""ZB-V: two stages per rank, with the second half of the model in reverse order of ranks (Qi et al., 2024,
arXiv:2405.15362). Each rank has as many activations as the first rank of 1F1B."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import (
    ArrayNamespace,
    PipelineTimes,
    RankProgram,
    Schedule,
    number_microbatches,
)
from kumi.spec.schedules.v_shape import DOWN, UP, transfer_delay


def program(rank: int, pp: int, stages: int, microbatches: int) -> RankProgram:
    """Return the actions (kind, chunk) of `rank` in a step: F forward, B backward, I input and W weight gradient."""
    # The number of ranks from this one to the bottom of the V, and the fewest microbatches that fill all phases.
    far, enough = pp - rank, 2 * pp - 1
    if microbatches < enough:
        longer = number_microbatches(program(rank, pp, stages, enough).chunk_actions, (DOWN, UP))
        fewer = tuple((kind, chunk) for kind, chunk, microbatch in longer if microbatch < microbatches)
        return RankProgram(fewer, (), 0, ())
    triple = (("F", UP), ("I", UP), ("W", UP))
    warmup = (*(("F", DOWN),) * (2 * far - 1), *(("F", UP), ("F", DOWN)) * rank, *triple * far)
    steady = (("F", DOWN), ("I", DOWN), ("W", DOWN), *triple)
    cooldown = (
        *steady[1:] * (far - 1),
        *(("I", DOWN), ("I", UP)) * rank,
        *(("I", DOWN), ("W", DOWN)) * far,
        *(("W", UP),) * rank,
        *(("W", DOWN),) * rank,
    )
    return RankProgram(warmup, steady, microbatches - enough + rank, cooldown)


def in_flight(xp: ArrayNamespace, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    """Return the peak number of (microbatch, stage) pairs with live activations on `rank`."""
    return xp.minimum(2 * pp, microbatches + xp.minimum(microbatches, rank + 1))


def bubble(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds of a step beyond the work of the busiest rank.

    A path counts forwards, input gradients, weight gradients and transfers. q is the number of other ranks, k that of
    microbatches after the first, at most 2 q. `few` and `many` are the paths with fewer than 2 q of these microbatches,
    and with as many or more.
    """
    q, k = x.other_ranks, xp.minimum(x.later, 2 * x.other_ranks)
    less = 2 * q - k
    few = [
        (less, less, 0, 4 * q),
        (xp.maximum(0, less - k), 2 * q, -2 * xp.maximum(0, k - q), 4 * q + k),
        (2 * q, xp.maximum(0, less - k), -2 * xp.minimum(k, q), 4 * q),
    ]
    many = [
        (0, q, 0, 5 * q - 2),
        (1, 0, q - 1, 3 * q - 2),
        (0, 1, q - 1, 3 * q),
        (0, 2 * q, -2 * q, 6 * q - 2),
        (2 * q, -q, -1, 3 * q),
        (2 * q - 1, 1 - q, 0, 3 * q - 2),
        (q - 1, 1, 0, 5 * q - 2),
        (2 * q, 0, -2 * q - 1, 4 * q),
        (2 * q - 1, 1, -2 * q, 4 * q - 2),
        (q, 0, -1, 5 * q),
        (q - 1, q + 1, -2 * q, 6 * q - 2),
        (q, q, -2 * q - 1, 6 * q),
    ]
    return xp.where(less > 0, x.critical_path(xp, few), x.critical_path(xp, many)) + transfer_delay(xp, x)


SCHEDULE = Schedule(program, in_flight, bubble, stages=2, v_shaped=True, splits_backward=True)
