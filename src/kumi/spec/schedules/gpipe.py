"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import Arrays, Pattern, Rows, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    return Pattern((("F", 0),) * microbatches, (), 0, (("B", 0),) * microbatches)


def in_flight(xp: Arrays, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    return microbatches


def bubble(xp: Arrays, x: Rows) -> Any:
    """A link that takes longer than a stage delays every microbatch."""
    q, backward = x.others, x.work - x.ahead
    slow = xp.maximum(0.0, x.send - x.ahead) + xp.maximum(0.0, x.send - backward)
    return x.longest(xp, [(q, q, q, 2 * q)]) + x.after * slow


SCHEDULE = Schedule(program, in_flight, bubble, forwards_first=True, common=True)
