"""Language modelling and supervised fine-tuning: the mean negative log-probability of the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kumi.objectives.objective import IGNORED, LinearObjective
from kumi.objectives.row_form import RowForm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LanguageModeling(LinearObjective):
    """The mean over all tokens with a label, weighted by the column "loss_weights" if the batch has it.

    With l the negative log-prob of a token and w its weight, the loss is sum w l / sum w over all tokens of the step.
    Without the column, every w is 1. Either all batches of a run have the column, or none has.
    """

    columns: ClassVar[Mapping[str, Literal["token", "row"]]] = {"loss_weights": "token"}

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of labels that are not ignored, or the sum of their weights."""
        trained = batch["labels"] != IGNORED
        if "loss_weights" not in batch:
            return int(trained.sum())
        # Exact, so that the sum is the same in every order and division of the tokens, up to its last rounding.
        return math.fsum(batch["loss_weights"][trained].tolist())

    def token_weights(self, batch: Mapping[str, Tensor], units: float) -> Tensor:
        """Return -w / `units` for each label of weight w that is not ignored, else 0."""
        weights = (batch["labels"] != IGNORED).float() * (-1.0 / units)
        return weights * batch["loss_weights"] if "loss_weights" in batch else weights


@dataclass(frozen=True)
class SupervisedFineTuning(LanguageModeling):
    """Language modelling on the replies of examples, each token with the weight of its message; plain text is refused.

    The objective for mixtures of examples and plain text is language modelling.
    """

    rows: ClassVar[RowForm] = RowForm(("chat", "prompt-completion", "instruction"))
    usual_lr: ClassVar[float | None] = 2e-5
    evaluated: ClassVar[tuple[str, ...]] = ("entropy", "mean_token_accuracy")
