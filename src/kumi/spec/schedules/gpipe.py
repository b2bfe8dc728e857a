"""GPipe: all forwards, then all backwards (Huang et al., 2019, arXiv:1811.06965)."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import ArrayNamespace, PipelineTimes, RankProgram, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> RankProgram:
    """Return the actions (kind, chunk) of `rank` in a step: F forward, B backward, I input and W weight gradient."""
    return RankProgram((("F", 0),) * microbatches, (), 0, (("B", 0),) * microbatches)


def in_flight(xp: ArrayNamespace, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    """Return the peak number of (microbatch, stage) pairs with live activations on `rank`."""
    return microbatches


def bubble(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds of a step beyond the work of the busiest rank.

    A transfer that takes longer than a stage delays each microbatch. A path counts forwards, input gradients, weight
    gradients and transfers; q is the number of other ranks.
    """
    q, backward = x.other_ranks, x.busiest_work - x.busiest_forward
    slow = xp.maximum(0.0, x.send - x.busiest_forward) + xp.maximum(0.0, x.send - backward)
    return x.critical_path(xp, [(q, q, q, 2 * q)]) + x.later * slow


SCHEDULE = Schedule(program, in_flight, bubble, forwards_first=True, common=True)
