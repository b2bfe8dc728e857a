"""ZB-H2: ZB-H1 with twice the forwards ahead (Qi et al., 2024, arXiv:2401.10241, section 2.2). The bubble at the start
is filled with forwards and the one at the end with weight gradients."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import Arrays, Pattern, Rows, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    warm = min(microbatches, 2 * (pp - rank) - 1)
    early = min(microbatches - warm, 2 * rank)
    late = min(microbatches, 2 * rank) - early
    repeats = microbatches - warm - early
    rest = (*(("I", 0),) * late, *(("I", 0), ("W", 0)) * (warm - late), *(("W", 0),) * (early + late))
    return Pattern((*(("F", 0),) * warm, *(("I", 0), ("F", 0)) * early), (("I", 0), ("W", 0), ("F", 0)), repeats, rest)


def in_flight(xp: Arrays, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    return xp.minimum(microbatches, 2 * pp - 1)


def bubble(xp: Arrays, x: Rows) -> Any:
    q, k = x.others, xp.minimum(x.after, 2 * x.others)
    up, down = q - xp.ceil(k / 2), q - xp.floor(k / 2)
    odd = k % 2
    paths = [
        (q, up, 0, q + up),
        (q - k, q, 0, 2 * q),
        (q, q, -k, 2 * q),
        (q - odd, down, 0, q + up),
        (q, down, -odd, q + up),
    ]
    trip = ((q + 1) * (x.forward + x.inputs) + x.weights + 2 * q * x.send) / (2 * q + 1)
    return x.longest(xp, paths) + x.after * xp.maximum(0.0, xp.maximum(trip, x.send) - x.work)


SCHEDULE = Schedule(program, in_flight, bubble, splits_backward=True, reach=2)
