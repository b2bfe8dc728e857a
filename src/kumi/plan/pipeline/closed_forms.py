"""The time of a pipeline in closed form, for a search over millions of layouts.

With equal stages and transfers that are short compared with the work, a step takes the work of one rank in
all microbatches, plus the critical path through the pipeline's fill and drain: the longest of a few paths, each
a whole number of forwards, input gradients, weight gradients and transfers (`Schedule.bubble`). The paths were derived
from simulations of the schedules' action lists (`kumi.spec.schedule`) with many random durations; tests compare the
two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kumi.plan.layout_batch import Floats, Ints
from kumi.spec.schedules import SCHEDULES
from kumi.spec.schedules.schedule_record import PipelineTimes


def closed_form(
    schedule: Ints,
    pp: Ints,
    stages: Ints,
    microbatches: Ints,
    all_ranks: Sequence[Floats],
    busiest: Sequence[Floats],
    transfer: Floats | float = 0.0,
    *,
    blocking: bool = False,
) -> Floats:
    """Return the seconds between the first and the last action of a step, (rows,), as `timeline.simulate` does.

    `schedule`: indices into `kumi.spec.schedules.SCHEDULES`.
    `all_ranks`, `busiest`: seconds of one microbatch's forward, input gradient and weight gradient, summed over all
    ranks and on the busiest rank, each over all its stages.
    `transfer`: seconds from one stage to the next; `blocking` as in `simulate`.

    Exact for equal stages and transfers of at most a third of the shortest action; zero-bubble schedules also need
    2 pp microbatches or more. Otherwise an approximation (tests/plan/test_closed.py states the errors): only the sum
    of unequal stages and the busiest rank count, and a long transfer counts by the round trip that it delays most.
    """
    if blocking:
        all_ranks, busiest = _with_blocking_sends(pp, stages, all_ranks, busiest, transfer)
        transfer = 0.0
    send = np.broadcast_to(np.where(pp > 1, transfer, 0.0), len(pp))
    other_stages = np.maximum(1, (pp - 1) * stages)
    mean = [(total - own) / other_stages for total, own in zip(all_ranks, busiest, strict=True)]
    columns = (pp - 1, stages, microbatches - 1, busiest[0], sum(busiest), *mean, send)
    seconds = np.zeros(len(pp))
    for code, record in enumerate(SCHEDULES.values()):
        selected = schedule == code
        if not selected.any():
            continue
        rows = PipelineTimes(*(np.asarray(column[selected], np.float64) for column in columns))
        bubble = record.bubble(np, rows)
        seconds[selected] = (rows.later + 1) * rows.busiest_work + np.where(rows.other_ranks > 0, bubble, 0.0)
    return seconds


def _with_blocking_sends(
    pp: Ints, stages: Ints, all_ranks: Sequence[Floats], busiest: Sequence[Floats], transfer: Floats | float
) -> tuple[Sequence[Floats], Sequence[Floats]]:
    """Return `all_ranks` and `busiest` with each transfer counted as part of the action whose result it sends."""
    boundaries, has_pipeline = pp * stages - 1, pp > 1
    # With two ranks, each sends in one direction only, and in both if it has several stages.
    forward = np.where(has_pipeline, stages * transfer, 0.0)
    backward = np.where(pp > 2, stages, stages - 1) * np.where(has_pipeline, transfer, 0.0)
    total = np.where(has_pipeline, boundaries * transfer, 0.0)
    return (
        (all_ranks[0] + total, all_ranks[1] + total, all_ranks[2]),
        (busiest[0] + forward, busiest[1] + backward, busiest[2]),
    )
