"""Interleaved 1F1B: a rank has several stages, and each group of pp microbatches goes through them in turn (Narayanan
et al., 2021, arXiv:2104.04473)."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import ArrayNamespace, PipelineTimes, RankProgram, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> RankProgram:
    """Return the actions (kind, chunk) of `rank` in a step: F forward, B backward, I input and W weight gradient."""
    total, one_round = stages * microbatches, stages * pp
    forwards = [("F", chunk) for chunk in range(stages) for _ in range(pp)]
    backwards = [("B", chunk) for chunk in reversed(range(stages)) for _ in range(pp)]
    warmup = min(total, (stages - 1) * pp + 2 * (pp - 1 - rank))
    ahead = [forwards[(warmup + index) % one_round] for index in range(one_round)]
    steady = tuple(token for pair in zip(ahead, backwards, strict=True) for token in pair)
    repeats, extra = divmod(total - warmup, one_round)
    last = [backwards[index % one_round] for index in range(extra, extra + warmup)]
    return RankProgram(
        tuple(forwards[index % one_round] for index in range(warmup)), steady, repeats, (*steady[: 2 * extra], *last)
    )


def in_flight(xp: ArrayNamespace, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    """Return the peak number of (microbatch, stage) pairs with live activations on `rank`."""
    return xp.minimum(microbatches * stages, (stages - 1) * pp + 2 * (pp - rank - 1) + 1)


def bubble(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds of a step beyond the work of the busiest rank.

    After the first microbatch, a chunk takes the longest of: the busiest rank's work on it (`own`); a round trip over
    the q other ranks, divided by the 2 q + 1 chunks in flight (`trip`); one action and one transfer (`turn`); and its
    share of the time on a link (`link`). A path counts forwards, input gradients, weight gradients and transfers.
    """
    q, v = x.other_ranks, x.stages
    own, other = x.busiest_work / v, x.other_work / v
    trip = (own + q * other + 2 * q * x.send) / (2 * q + 1)
    turn = xp.maximum(x.forward, x.input_grad + x.weight_grad) + x.send
    link = x.send * xp.where(q == 1, 2 - 1 / v, 1)
    slow = xp.maximum(0.0, xp.maximum(xp.maximum(trip, turn), link) - own)
    return x.critical_path(xp, [(q, q, q, 2 * ((q + 1) * v - 1))]) + (x.later - q) * v * slow


SCHEDULE = Schedule(program, in_flight, bubble, stages=2, more_stages=True, in_rounds=True, common=True)
