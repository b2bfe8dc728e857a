"""Interleaved 1F1B: several stages a rank, pp microbatches at a time through each (Narayanan et al., 2021,
arXiv:2104.04473)."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import Arrays, Pattern, Rows, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> Pattern:
    total, one_round = stages * microbatches, stages * pp
    forwards = [("F", chunk) for chunk in range(stages) for _ in range(pp)]
    backwards = [("B", chunk) for chunk in reversed(range(stages)) for _ in range(pp)]
    warm = min(total, (stages - 1) * pp + 2 * (pp - 1 - rank))
    ahead = [forwards[(warm + index) % one_round] for index in range(one_round)]
    block = tuple(token for pair in zip(ahead, backwards, strict=True) for token in pair)
    repeats, odd = divmod(total - warm, one_round)
    left = [backwards[index % one_round] for index in range(odd, odd + warm)]
    return Pattern(
        tuple(forwards[index % one_round] for index in range(warm)), block, repeats, (*block[: 2 * odd], *left)
    )


def in_flight(xp: Arrays, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    return xp.minimum(microbatches * stages, (stages - 1) * pp + 2 * (pp - rank - 1) + 1)


def bubble(xp: Arrays, x: Rows) -> Any:
    q, v = x.others, x.stages
    own, other = x.work / v, x.total / v
    trip = (own + q * other + 2 * q * x.send) / (2 * q + 1)
    turn = xp.maximum(x.forward, x.inputs + x.weights) + x.send
    link = x.send * xp.where(q == 1, 2 - 1 / v, 1)
    slow = xp.maximum(0.0, xp.maximum(xp.maximum(trip, turn), link) - own)
    return x.longest(xp, [(q, q, q, 2 * ((q + 1) * v - 1))]) + (x.after - q) * v * slow


SCHEDULE = Schedule(program, in_flight, bubble, stages=2, more_stages=True, in_rounds=True, common=True)
