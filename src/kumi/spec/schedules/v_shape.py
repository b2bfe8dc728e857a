"""What schedules share that hold two stages a rank, down and back over the ranks."""

from __future__ import annotations

from typing import Any

from kumi.spec.schedules.schedule_record import Arrays, Rows

# A rank's stages: the one on the way down, and the one on the way back.
DOWN, UP = 0, 1


def slow(xp: Arrays, x: Rows) -> Any:
    """Return the seconds by which transfers delay all microbatches but the first, where they are longer than the chunks
    that a rank keeps can cover, or than its work, as the chunks of both directions of the V share a link."""
    trip = x.forward + x.inputs + (x.forward + x.inputs + 2 * x.weights + 4 * x.others * x.send) / (2 * x.others + 1)
    return x.after * xp.maximum(0.0, xp.maximum(trip, 2 * x.send) - x.work)
