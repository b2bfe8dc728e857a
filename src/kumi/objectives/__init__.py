"""Training objectives: losses as functions of the tokens' log-probs, independent of the parallel layout.

To add an objective, write its class in a new file of this package, and add its kind to `OBJECTIVES`.
"""

from __future__ import annotations

from kumi.objectives.lm import LanguageModeling
from kumi.objectives.objective import IGNORED, LinearObjective, Objective, SegmentSums

# objective.kind -> the objective.
OBJECTIVES: dict[str, Objective] = {"lm": LanguageModeling()}

__all__ = ["IGNORED", "OBJECTIVES", "LinearObjective", "Objective", "SegmentSums"]
