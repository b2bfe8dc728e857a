"""ZB-H1: 1F1B with weight gradients put off by as many microbatches as the rank's number (Qi et al., 2024,
arXiv:2401.10241, section 2.1), so that no rank keeps more than the first rank of 1F1B."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import Arrays, Pattern, Rows, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    warm = min(microbatches, pp - 1 - rank)
    early = min(microbatches - warm, rank)
    late = min(microbatches, rank) - early
    repeats = microbatches - warm - early
    rest = (*(("I", 0),) * late, *(("I", 0), ("W", 0)) * (warm - late), *(("W", 0),) * (early + late))
    return Pattern((*(("F", 0),) * warm, *(("F", 0), ("I", 0)) * early), (("F", 0), ("I", 0), ("W", 0)), repeats, rest)


def in_flight(xp: Arrays, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    return xp.minimum(microbatches, pp)


def bubble(xp: Arrays, x: Rows) -> Any:
    q, k = x.others, xp.minimum(x.after, x.others)
    short = x.longest(xp, [(q, q - k, 0, 2 * q + k), (q - k, q, 0, 2 * q), (q, q, -k, 2 * q + 2 * k)])
    late = x.forward + x.inputs + 2 * x.send - x.work
    slow = x.longest(xp, [(q, q, 0, 2 * q)]) + (x.after - xp.ceil(x.after / (q + 1))) * late
    return xp.where(late > 0, xp.maximum(short, slow), short)


SCHEDULE = Schedule(program, in_flight, bubble, splits_backward=True)
