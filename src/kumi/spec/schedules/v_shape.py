"""Shared parts of the V-shaped schedules, with two stages per rank: one on the way down, one on the way back."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import ArrayNamespace, PipelineTimes

# Chunks of a rank: the stage on the way down, and the stage on the way back.
DOWN, UP = 0, 1


def transfer_delay(xp: ArrayNamespace, x: PipelineTimes) -> Any:
    """Return the seconds by which transfers delay all microbatches after the first.

    There is a delay if transfers take longer than the chunks in flight on a rank can cover, or longer than the rank's
    work, because both directions of the V share a link. A microbatch then takes `trip` seconds, or those of two sends.
    """
    trip = (
        x.forward
        + x.input_grad
        + (x.forward + x.input_grad + 2 * x.weight_grad + 4 * x.other_ranks * x.send) / (2 * x.other_ranks + 1)
    )
    return x.later * xp.maximum(0.0, xp.maximum(trip, 2 * x.send) - x.busiest_work)
