"""Training objectives: losses as functions of the tokens' log-probs, independent of the parallel layout.

To add an objective, write its class in a new file of this package, and add its kind to `OBJECTIVES`. The fields of the
class become keys of the section [objective].
"""

from __future__ import annotations

from kumi.objectives.dpo import DirectPreference
from kumi.objectives.kto import Kto
from kumi.objectives.lm import LanguageModeling, SupervisedFineTuning
from kumi.objectives.objective import (
    IGNORED,
    LinearObjective,
    MismatchedObjective,
    Objective,
    SegmentSums,
    SequenceObjective,
    TokenObjective,
    sequence_sums,
)
from kumi.objectives.policy_presets import POLICY_GRADIENTS
from kumi.objectives.reward import RewardModel
from kumi.objectives.row_form import LM_KINDS, LM_ROWS, MISMATCHED, RowForm
from kumi.objectives.unreferenced import ContrastivePreference, OddsRatio, SimplePreference

# objective.kind -> the objective, a dataclass whose fields are its options.
OBJECTIVES: dict[str, type[Objective]] = {
    "lm": LanguageModeling,
    "sft": SupervisedFineTuning,
    "dpo": DirectPreference,
    "kto": Kto,
    "orpo": OddsRatio,
    "simpo": SimplePreference,
    "cpo": ContrastivePreference,
    "reward": RewardModel,
    **POLICY_GRADIENTS,
}

__all__ = [
    "IGNORED",
    "LM_KINDS",
    "LM_ROWS",
    "MISMATCHED",
    "OBJECTIVES",
    "LinearObjective",
    "MismatchedObjective",
    "Objective",
    "RowForm",
    "SegmentSums",
    "SequenceObjective",
    "TokenObjective",
    "sequence_sums",
]
