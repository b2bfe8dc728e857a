"""The columns and metrics that all objectives on preference pairs share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kumi.objectives.objective import SequenceObjective
from kumi.objectives.row_form import RowForm

if TYPE_CHECKING:
    from torch import Tensor


class Pairs(NamedTuple):
    """The two sides of each pair of a batch, each (B, P); `mask` is 1.0 for a pair, 0.0 where a row has none."""

    chosen: Tensor
    rejected: Tensor
    mask: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` (B, P) over all pairs."""
        return (values * self.mask).sum()


def pairs_of(values: Tensor, batch: Mapping[str, Tensor]) -> Pairs:
    """Return the pairs of `values` (B, G): sequences 2k and 2k + 1 of a row are the chosen and the rejected side."""
    mask = (batch["trained"][:, 0::2] > 0).to(values.dtype)
    return Pairs(values[:, 0::2], values[:, 1::2], mask)


def token_means(totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean over the trained tokens of each sequence, given the sums `totals` (B, G)."""
    return totals / batch["trained"].clamp(min=1)


class PreferenceObjective(SequenceObjective):
    """A loss on pairs of a chosen and a rejected sequence, the mean over pairs.

    Rewards, in the metrics, are the numbers of each side that the loss compares (see `rewards`).
    """

    rows: ClassVar[RowForm] = RowForm(("preference",), sequences=True)
    unit: ClassVar[str] = "pairs"
    metrics: ClassVar[tuple[str, ...]] = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    )

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of pairs in `batch`."""
        return int((batch["trained"][:, 0::2] > 0).sum())

    @abstractmethod
    def rewards(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the reward (B, G) of each sequence, for the metrics."""

    def measure(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a sum and the number of its terms for each of `metrics`.

        "margins" is the difference of the rewards, "accuracies" the share of pairs in which the chosen side has the
        higher reward (a tie counts as half), and "logps" the mean log-prob of a token.
        """
        import torch

        chosen, rejected, mask = pairs = pairs_of(self.rewards(totals, batch), batch)
        ahead = chosen - rejected
        right = (ahead > 0).to(mask.dtype) + 0.5 * (ahead == 0).to(mask.dtype)
        count = mask.sum()
        log_probs, tokens = pairs_of(totals, batch), pairs_of(batch["trained"].to(totals.dtype), batch)
        return torch.stack(
            [
                *(torch.stack([pairs.sum(values), count]) for values in (chosen, rejected, ahead, right)),
                torch.stack([log_probs.sum(log_probs.chosen), tokens.sum(tokens.chosen)]),
                torch.stack([log_probs.sum(log_probs.rejected), tokens.sum(tokens.rejected)]),
            ]
        )
