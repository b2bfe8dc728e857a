"""ZB-H2: ZB-H1 with twice as many forwards in the warmup (Qi et al., 2024, arXiv:2401.10241, section 2.2). Forwards
fill the bubble of the warmup, weight gradients the bubble of the cooldown."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import ArrayNamespace, PipelineTimes, RankProgram, Schedule


def program(rank: int, pp: int, stages: int, microbatches: int) -> RankProgram:
    """Return the actions (kind, chunk) of `rank` in a step: F forward, B backward, I input and W weight gradient."""
    warmup = min(microbatches, 2 * (pp - rank) - 1)
    early = min(microbatches - warmup, 2 * rank)
    late = min(microbatches, 2 * rank) - early
    repeats = microbatches - warmup - early
    cooldown = (*(("I", 0),) * late, *(("I", 0), ("W", 0)) * (warmup - late), *(("W", 0),) * (early + late))
    return RankProgram(
        (*(("F", 0),) * warmup, *(("I", 0), ("F", 0)) * early), (("I", 0), ("W", 0), ("F", 0)), repeats, cooldown
    )


def in_flight(xp: ArrayNamespace, pp: Any, stages: Any, microbatches: Any, rank: Any) -> Any:
    """Return the peak number of (microbatch, stage) pairs with live activations on `rank`."""
    return xp.minimum(microbatches, 2 * pp - 1)


def bubble(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds of a step beyond the work of the busiest rank.

    A path counts forwards, input gradients, weight gradients and transfers. q is the number of other ranks, k that of
    microbatches after the first, at most 2 q. After the first microbatch, each one takes at least as long as a round
    trip divided by the microbatches in flight (`trip`), and as a transfer.
    """
    q, k = x.other_ranks, xp.minimum(x.later, 2 * x.other_ranks)
    up, down = q - xp.ceil(k / 2), q - xp.floor(k / 2)
    odd = k % 2
    paths = [
        (q, up, 0, q + up),
        (q - k, q, 0, 2 * q),
        (q, q, -k, 2 * q),
        (q - odd, down, 0, q + up),
        (q, down, -odd, q + up),
    ]
    trip = ((q + 1) * (x.forward + x.input_grad) + x.weight_grad + 2 * q * x.send) / (2 * q + 1)
    return x.critical_path(xp, paths) + x.later * xp.maximum(0.0, xp.maximum(trip, x.send) - x.busiest_work)


SCHEDULE = Schedule(program, in_flight, bubble, splits_backward=True, reach=2)
