"""KTO: a reply is desirable or not, on its own (Ethayarajh et al., 2024, arXiv:2402.01306, eq. 7).

With L and R the sums of policy and reference log-probs over a reply's tokens, and S the logistic function:

    desirable    w_D (1 - S(b (L - R - z)))
    undesirable  w_U (1 - S(b (z - (L - R))))

b is `beta`; w_D and w_U are `desirable_weight` and `undesirable_weight`.

z = max(0, mean of L - R over mismatched pairs), without a gradient. A mismatched pair is a prompt and the reply of the
example before it in the data. The mean is over the whole step, so that no layout and no number of microbatches changes
z. TRL takes the mean over a microbatch of each process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kumi.objectives.objective import MismatchedObjective
from kumi.objectives.options import check_not_negative, check_positive
from kumi.objectives.row_form import RowForm
from kumi.spec.field_docs import described

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Kto(MismatchedObjective):
    """The mean over replies of KTO's loss, see the module's docstring."""

    beta: float = described("Factor of log-probs; a larger one keeps the policy nearer to the reference.", 0.1)
    desirable_weight: float = described("Weight of desirable replies in the loss.", 1.0)
    undesirable_weight: float = described("Weight of undesirable replies in the loss.", 1.0)

    rows: ClassVar[RowForm] = RowForm(("feedback",), sequences=True, mismatched=True)
    unit: ClassVar[str] = "replies"
    reference: ClassVar[bool] = True
    usual_lr: ClassVar[float | None] = 1e-6
    metrics: ClassVar[tuple[str, ...]] = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        check_not_negative(desirable_weight=self.desirable_weight, undesirable_weight=self.undesirable_weight)

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of replies in `batch`."""
        return int((batch["trained"] > 0).sum())

    def sequence_loss(self, totals: Tensor, batch: Mapping[str, Tensor], units: float) -> Tensor:
        ahead = self.beta * (totals - batch["reference"] - _baseline(batch))
        desirable, undesirable = _sides(batch)
        losses = self.desirable_weight * desirable * (1 - ahead.sigmoid())
        losses = losses + self.undesirable_weight * undesirable * (1 - (-ahead).sigmoid())
        return losses.sum() / units

    def statistics(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of L - R over mismatched pairs, and the number of these pairs, (2,)."""
        mask = (batch["mismatched_trained"] > 0).to(totals.dtype)
        return _sum_and_count(totals - batch["mismatched_reference"], mask)

    def measure(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a sum and the number of its terms for each of `metrics`.

        "chosen" are desirable replies, "rejected" undesirable ones. The rewards are b (L - R), "logps" are log-probs of
        single tokens, and "kl" is z.
        """
        import torch

        rewards = self.beta * (totals - batch["reference"])
        desirable, undesirable = _sides(batch)
        tokens = batch["trained"].to(totals.dtype)
        mask = desirable + undesirable
        return torch.stack(
            [
                _sum_and_count(rewards, desirable),
                _sum_and_count(rewards, undesirable),
                torch.stack([(totals * desirable).sum(), (tokens * desirable).sum()]),
                torch.stack([(totals * undesirable).sum(), (tokens * undesirable).sum()]),
                _sum_and_count(_baseline(batch) * mask, mask),
            ]
        )


def _baseline(batch: Mapping[str, Tensor]) -> Tensor:
    """Return z, a scalar."""
    total, count = batch["statistics"]
    baseline: Tensor = (total / count.clamp(min=1)).clamp(min=0)
    return baseline


def _sides(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return two masks (B, G): 1.0 for desirable replies, and 1.0 for undesirable ones, else 0.0."""
    mask, desirable = (batch["trained"] > 0).double(), batch["desirable"].double()
    return mask * desirable, mask * (1 - desirable)


def _sum_and_count(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` where `mask` is 1.0, and the number of such values, (2,)."""
    import torch

    return torch.stack([(values * mask).sum(), mask.sum()])
