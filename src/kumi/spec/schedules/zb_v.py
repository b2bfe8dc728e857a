"""ZB-V: two stages a rank, the second half of the model going back over the ranks (Qi et al., 2024, arXiv:2405.15362).
Every rank keeps as much as the first one of 1F1B."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import Arrays, Pattern, Rows, Schedule, numbered
from kumi.spec.schedules.v_shape import DOWN, UP, slow


def program(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    far, enough = pp - rank, 2 * pp - 1
    if microbatches < enough:
        whole = numbered(program(rank, pp, stages, enough).tokens, (DOWN, UP))
        return Pattern(tuple((kind, chunk) for kind, chunk, number in whole if number < microbatches), (), 0, ())
    triple = (("F", UP), ("I", UP), ("W", UP))
    warm = (*(("F", DOWN),) * (2 * far - 1), *(("F", UP), ("F", DOWN)) * rank, *triple * far)
    block = (("F", DOWN), ("I", DOWN), ("W", DOWN), *triple)
    cool = (
        *block[1:] * (far - 1),
        *(("I", DOWN), ("I", UP)) * rank,
        *(("I", DOWN), ("W", DOWN)) * far,
        *(("W", UP),) * rank,
        *(("W", DOWN),) * rank,
    )
    return Pattern(warm, block, microbatches - enough + rank, cool)


def in_flight(xp: Arrays, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    return xp.minimum(2 * pp, microbatches + xp.minimum(microbatches, rank + 1))


def bubble(xp: Arrays, x: Rows) -> Any:
    q, k = x.others, xp.minimum(x.after, 2 * x.others)
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
    return xp.where(less > 0, x.longest(xp, few), x.longest(xp, many)) + slow(xp, x)


SCHEDULE = Schedule(program, in_flight, bubble, stages=2, v_shaped=True, splits_backward=True)
