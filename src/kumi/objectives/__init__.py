"""What is learned: functions of the log-probs of tokens, which know nothing of how the model is divided.

To add an objective, write its class in a file of its own, and its kind in `OBJECTIVES`.
"""

from __future__ import annotations

from kumi.objectives.lm import LanguageModeling
from kumi.objectives.types import IGNORED, LinearObjective, Objective, SegmentSums

# objective.kind -> what it computes.
OBJECTIVES: dict[str, Objective] = {"lm": LanguageModeling()}

__all__ = ["IGNORED", "OBJECTIVES", "LinearObjective", "Objective", "SegmentSums"]
