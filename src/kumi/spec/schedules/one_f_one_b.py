"""1F1B: backward as early as possible, which frees the activations of its forward (Narayanan et al., 2019,
PipeDream)."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import ArrayNamespace, PipelineTimes, RankProgram, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> RankProgram:
    """Return the actions (kind, chunk) of `rank` in a step: F forward, B backward, I input and W weight gradient."""
    warmup = min(microbatches, pp - 1 - rank)
    return RankProgram((("F", 0),) * warmup, (("F", 0), ("B", 0)), microbatches - warmup, (("B", 0),) * warmup)


def in_flight(xp: ArrayNamespace, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    """Return the peak number of (microbatch, stage) pairs with live activations on `rank`."""
    return xp.minimum(microbatches, pp - rank)


def bubble(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds of a step beyond the work of the busiest rank.

    A path counts forwards, input gradients, weight gradients and transfers; q is the number of other ranks. The
    microbatches in flight only just cover the work of the other ranks, so transfers add to the time of each microbatch,
    except the first and one in every pp.
    """
    q = x.other_ranks
    late = xp.maximum(0.0, x.other_work + 2 * x.send - x.busiest_work)
    return x.critical_path(xp, [(q, q, q, 2 * q)]) + (x.later - xp.ceil(x.later / (q + 1))) * late


SCHEDULE = Schedule(program, in_flight, bubble, common=True)
