"""ZB-H1: 1F1B with weight gradients deferred by as many microbatches as the rank's index (Qi et al., 2024,
arXiv:2401.10241, section 2.1). No rank has more microbatches in flight than the first rank of 1F1B."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import ArrayNamespace, PipelineTimes, RankProgram, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> RankProgram:
    """Return the actions (kind, chunk) of `rank` in a step: F forward, B backward, I input and W weight gradient."""
    warmup = min(microbatches, pp - 1 - rank)
    early = min(microbatches - warmup, rank)
    late = min(microbatches, rank) - early
    repeats = microbatches - warmup - early
    cooldown = (*(("I", 0),) * late, *(("I", 0), ("W", 0)) * (warmup - late), *(("W", 0),) * (early + late))
    return RankProgram(
        (*(("F", 0),) * warmup, *(("F", 0), ("I", 0)) * early), (("F", 0), ("I", 0), ("W", 0)), repeats, cooldown
    )


def in_flight(xp: ArrayNamespace, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    """Return the peak number of (microbatch, stage) pairs with live activations on `rank`."""
    return xp.minimum(microbatches, pp)


def bubble(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds of a step beyond the work of the busiest rank.

    A path counts forwards, input gradients, weight gradients and transfers. The bubble is `short` if work hides the
    transfers of later microbatches; else each of these is `late`. q is the number of other ranks, k that of
    microbatches after the first, at most q.
    """
    q, k = x.other_ranks, xp.minimum(x.later, x.other_ranks)
    short = x.critical_path(xp, [(q, q - k, 0, 2 * q + k), (q - k, q, 0, 2 * q), (q, q, -k, 2 * q + 2 * k)])
    late = x.forward + x.input_grad + 2 * x.send - x.busiest_work
    slow = x.critical_path(xp, [(q, q, 0, 2 * q)]) + (x.later - xp.ceil(x.later / (q + 1))) * late
    return xp.where(late > 0, xp.maximum(short, slow), short)


SCHEDULE = Schedule(program, in_flight, bubble, splits_backward=True)
