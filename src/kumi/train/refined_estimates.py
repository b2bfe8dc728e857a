"""Estimates of the seconds of steps with rollouts, refined by the steps before.

Each part of a step has an estimate by formulas. It is multiplied by the median of measured/estimated over the latest
steps that had this part, so that what the formulas cannot see, such as other programs on the machine or long prompts of
one source, counts from the second step on. The estimates by formulas alone move from perf/estimated_step_s to
perf/planned_step_s and from time/estimated_<part>_s to time/planned_<part>_s, and the refined ones take their place. A
resumed run reads the latest ratios from its metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

# The number of latest ratios of a part that count: a median of five ignores two disturbed steps.
_LATEST = 5
_PARTS = ("generate", "log_probs", "train")


class RefinedEstimates:
    """Refines the estimates of a run's steps. `refine` must get the steps in their order.

    earlier: the metrics of the steps before a resume, on the same layout.
    """

    def __init__(self, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        self._ratios: dict[str, deque[float]] = {part: deque(maxlen=_LATEST) for part in _PARTS}
        for entry in earlier:
            self._add(entry)

    def refine(self, entry: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of a step that replace or extend those in `entry`; {} for a step without estimates.

        The seconds that the step took refine the estimates of later steps only.
        """
        formulas = entry.get("perf/estimated_step_s")
        if formulas is None:
            return {}
        changed, total = {"perf/planned_step_s": formulas}, formulas
        for part, ratios in self._ratios.items():
            estimated = entry.get(f"time/estimated_{part}_s")
            if not estimated or f"time/{part}_s" not in entry:
                continue
            refined = estimated * (median(ratios) if ratios else 1.0)
            changed |= {f"time/planned_{part}_s": estimated, f"time/estimated_{part}_s": refined}
            total += refined - estimated
        self._add({**entry, **changed})
        return {**changed, "perf/estimated_step_s": total}

    def _add(self, entry: Mapping[str, Any]) -> None:
        """Add the ratios of the step with the metrics `entry`, which are refined."""
        for part, ratios in self._ratios.items():
            planned, measured = entry.get(f"time/planned_{part}_s"), entry.get(f"time/{part}_s")
            if planned and measured:
                ratios.append(measured / planned)
