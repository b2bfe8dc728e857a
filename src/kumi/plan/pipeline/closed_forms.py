"""How long a pipeline takes, written out for every schedule: what a search asks of millions of layouts.

With equal stages and transfers that are short beside the work, the length of a step is the work of one rank,
m (F + I + W), plus the longest of a few paths through the pipeline's start and end, each a whole number of forwards,
input gradients, weight gradients and transfers (`Schedule.bubble`). They were read off the lists of
`kumi.spec.schedule`, carried out with many random durations; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kumi.plan.layout_batch import Floats, Ints
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import Rows


def closed_form(
    schedule: Ints,
    pp: Ints,
    stages: Ints,
    microbatches: Ints,
    sums: Sequence[Floats],
    most: Sequence[Floats],
    transfer: Floats | float = 0.0,
    *,
    blocking: bool = False,
) -> Floats:
    """Seconds from the first action to the last of `kumi.plan.pipeline.timeline.simulate`, (rows,), in closed form.

    `schedule` holds numbers of `kumi.spec.schedules.SCHEDULES`. `sums` are the seconds of a microbatch's forward, input
    gradient and weight gradient over all ranks, `most` those of the busiest rank, over all its stages. `transfer` is
    from a stage to the next; `blocking` as in `simulate`.

    Exact for equal stages and transfers of at most a third of the shortest action, where zero-bubble schedules have 2
    pp microbatches or more. Otherwise near (tests/plan/test_closed.py says how near): unequal stages enter by their sum
    and the busiest alone, longer transfers by the round trip that they delay most.
    """
    sums, most, transfer = _with_sends(pp, stages, sums, most, transfer) if blocking else (sums, most, transfer)
    send = np.broadcast_to(np.where(pp > 1, transfer, 0.0), len(pp))
    chunks = np.maximum(1, (pp - 1) * stages)
    mean = [(total - own) / chunks for total, own in zip(sums, most, strict=True)]
    seconds, records = np.zeros(len(pp)), list(SCHEDULES.values())
    for code in np.unique(schedule):
        rows = schedule == code
        given = (pp - 1, stages, microbatches - 1, most[0], sum(most), *mean, send)
        part = Rows(*(np.asarray(column[rows], np.float64) for column in given))
        bubble = records[int(code)].bubble(np, part)
        seconds[rows] = (part.after + 1) * part.work + np.where(part.others > 0, bubble, 0.0)
    return seconds


def _with_sends(
    pp: Ints, stages: Ints, sums: Sequence[Floats], most: Sequence[Floats], transfer: Floats | float
) -> tuple[Sequence[Floats], Sequence[Floats], float]:
    """`sums` and `most` with the transfers that ranks do nothing else during: each belongs to what it follows."""
    boundaries, apart = pp * stages - 1, pp > 1
    # With two ranks each sends one way only, and back where there are more stages.
    forward = np.where(apart, stages * transfer, 0.0)
    back = np.where(pp > 2, stages, stages - 1) * np.where(apart, transfer, 0.0)
    over = np.where(apart, boundaries * transfer, 0.0)
    return (sums[0] + over, sums[1] + over, sums[2]), (most[0] + forward, most[1] + back, most[2]), 0.0
