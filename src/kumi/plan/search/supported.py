"""What another trainer can carry out: which layouts a search may take, and why there may be none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from kumi.errors import LayoutError
from kumi.plan.search.candidates import Pins
from kumi.plan.search.refusal import from_pins
from kumi.spec.job import Job
from kumi.spec.layout import RECOMPUTE, Layout

# Every reason why a trainer cannot carry a layout of a job out; empty when it can.
Unsupported = Callable[[Job, Layout], list[str]]

# Values of what is not pinned. What is said of all their combinations is said of whatever the search would try.
OPEN: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2),
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2),
    "cp": (1, 2),
    "tp": (1, 2),
    "ep": (1, 2),
    "zero": (0, 1, 2, 3),
    "recompute": RECOMPUTE,
}


def accepted(job: Job, unsupported: Unsupported | None) -> Callable[[Layout], bool] | None:
    """Whether nothing is said against a layout of `job`; None where there is nobody to say anything."""
    return None if unsupported is None else lambda layout: not unsupported(job, layout)


def refuse_unsupported(job: Job, pinned: Pins, unsupported: Unsupported) -> None:
    """Raises LayoutError where the trainer can carry `job` out in no layout that agrees with `pinned`: said before
    millions of layouts are searched."""
    plain = from_pins(job, pinned)
    names = [name for name in OPEN if name not in pinned]
    said = [
        dict.fromkeys(unsupported(job, replace(plain, **dict(zip(names, values, strict=True)))))
        for values in product(*(OPEN[name] for name in names))
    ]
    always = [reason for reason in said[0] if all(reason in one for one in said)]
    if always:
        raise LayoutError(f"{job.engine.name} cannot carry this out in any layout: {'; '.join(always)}")


def none_supported(job: Job, fastest: Layout, unsupported: Unsupported) -> str:
    """Why none of the layouts that fit is supported: what keeps the trainer from the `fastest` of them."""
    return (
        f"{job.engine.name} can carry out none of the layouts that fit, for example not the fastest: "
        f"{'; '.join(unsupported(job, fastest))}; pin what {job.engine.name} has, or change the job so that more fit"
    )
