"""How long a pipeline takes, and what it keeps: lists of actions carried out in time, and closed forms for a search."""

from __future__ import annotations

import numpy as np

from kumi.plan.columns import Floats, Ints
from kumi.spec.layout import SCHEDULES
from kumi.spec.schedule import V_SHAPED

CODE = {name: number for number, name in enumerate(SCHEDULES)}
V_CODES = tuple(CODE[name] for name in V_SHAPED)


def in_flight(schedule: Ints, pp: Ints, stages: Ints, microbatches: Ints, rank: Ints) -> Floats:
    """How many microbatches' worth of pp rank `rank`'s layers keep activations at the peak, for every row.

    Activations are alive from the start of their forward to the end of the action that needs them last: the full
    backward, or the weight gradient. `schedule` holds indices into `kumi.spec.layout.SCHEDULES`. Where a rank has
    several stages, each is taken to hold the same part of its layers.
    """
    ahead, m = pp - rank, microbatches
    kept = {
        "gpipe": m,
        "1f1b": np.minimum(m, ahead),
        "interleaved": np.minimum(m * stages, (stages - 1) * pp + 2 * (ahead - 1) + 1),
        "zb-h1": np.minimum(m, pp),
        "zb-h2": np.minimum(m, 2 * pp - 1),
        "zb-v": np.minimum(2 * pp, m + np.minimum(m, rank + 1)),
        "dualpipe": np.minimum(2 * m, 2 * pp + 1),
    }
    found: Floats = np.select([schedule == CODE[name] for name in kept], list(kept.values()), 0) / stages
    return found
