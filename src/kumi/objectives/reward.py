"""Reward models: the score of the chosen side should be higher.

    -log S(s_chosen - s_rejected - margin) + c (s_chosen + s_rejected)^2

Ouyang et al., 2022, arXiv:2203.02155, eq. 1; the margin is from Touvron et al., 2023, arXiv:2307.09288, eq. 2, and the
centring term from Eisenstein et al., 2023, arXiv:2312.09244. S is the logistic function, s the score of a side of a
pair, and c is `center_rewards`. The score of a sequence is that of its last token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kumi.objectives.objective import IGNORED
from kumi.objectives.options import check_not_negative
from kumi.objectives.preferences import PreferenceObjective, pairs_of
from kumi.objectives.row_form import RowForm
from kumi.spec.field_docs import described

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RewardModel(PreferenceObjective):
    """The pairwise loss of a reward model, see the module's docstring. The "log-probs" of its methods are scores."""

    margin: float = described("Factor of the column `margin` of the rows, subtracted from the difference.", 1.0)
    center_rewards: float = described("Weight of the term that keeps the mean score of a pair near 0.", 0.0)

    head: ClassVar[Literal["lm", "score"]] = "score"
    usual_lr: ClassVar[float | None] = 3e-6
    rows: ClassVar[RowForm] = RowForm(("preference",), sequences=True, scored=True)
    metrics: ClassVar[tuple[str, ...]] = PreferenceObjective.metrics[:4]

    def __post_init__(self) -> None:
        check_not_negative(margin=self.margin, center_rewards=self.center_rewards)

    def tokens(self, batch: Mapping[str, Any]) -> int:
        """Return the number of tokens of the sequences in `batch`: a score depends on all of them.

        A row begins with its sequences, and each ends with its only label; what follows the last is padding.
        """
        import numpy as np

        scored = np.asarray(batch["labels"]) != IGNORED
        after_last = scored[:, ::-1].argmax(1)
        return int((scored.shape[1] - after_last)[scored.any(1)].sum())

    def sequence_loss(self, totals: Tensor, batch: Mapping[str, Tensor], units: float) -> Tensor:
        from torch.nn.functional import logsigmoid

        pairs = pairs_of(totals, batch)
        losses = -logsigmoid(pairs.chosen - pairs.rejected - self.margin * batch["margins"])
        return pairs.sum(losses + self.center_rewards * (pairs.chosen + pairs.rejected) ** 2) / units

    def rewards(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return totals

    def measure(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the rows for `metrics` of what `PreferenceObjective.measure` returns: those without "logps"."""
        return super().measure(totals, batch)[: len(self.metrics)]
