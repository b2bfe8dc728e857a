"""Language modelling: the mean negative log-probability of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kumi.objectives.objective import IGNORED, LinearObjective

if TYPE_CHECKING:
    from torch import Tensor


class LanguageModeling(LinearObjective):
    """The mean over all tokens with a label. Each token has the same weight."""

    def count(self, batch: Mapping[str, Any]) -> int:
        """Return the number of labels that are not ignored."""
        return int((batch["labels"] != IGNORED).sum())

    def token_weights(self, batch: Mapping[str, Tensor], units: float) -> Tensor:
        """Return -1 / `units` for each label that is not ignored, else 0."""
        return (batch["labels"] != IGNORED).float() * (-1.0 / units)
