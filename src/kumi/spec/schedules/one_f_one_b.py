"""1F1B: a backward as soon as there is one, which frees what its forward kept (Narayanan et al., 2019, PipeDream)."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import Arrays, Pattern, Rows, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    warm = min(microbatches, pp - 1 - rank)
    return Pattern((("F", 0),) * warm, (("F", 0), ("B", 0)), microbatches - warm, (("B", 0),) * warm)


def in_flight(xp: Arrays, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    return xp.minimum(microbatches, pp - rank)


def bubble(xp: Arrays, x: Rows) -> Any:
    """A rank keeps no more microbatches than it takes to cover the others' work: transfers come on top of it, once for
    each microbatch but the first and one in every pp."""
    q = x.others
    late = xp.maximum(0.0, x.total + 2 * x.send - x.work)
    return x.longest(xp, [(q, q, q, 2 * q)]) + (x.after - xp.ceil(x.after / (q + 1))) * late


SCHEDULE = Schedule(program, in_flight, bubble, common=True)
