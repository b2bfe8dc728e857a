"""What an objective is: which columns of a batch it reads, what it counts, and its loss as a function of log-probs.

An objective knows nothing of layouts. Its loss is a sum over the units of a step (tokens, pairs, ...) divided by their
number over all ranks and microbatches, so that every unit weighs the same however the step is divided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

# The label of a token that nothing is learned from.
IGNORED = -100

# (x, segments, count) -> the sums (B, count) of `x` (B, S) over the tokens of each of a row's `count` segments, whose
# numbers are `segments` (B, S). Under context parallelism they are those of whole rows.
SegmentSums = Callable[["Tensor", "Tensor", int], "Tensor"]


class Objective(ABC):
    """A loss whose terms may be any function of the log-probs of a row's labels.

    `columns` are the columns that only the objective reads, beside the labels: "token" for one of shape (B, S), whose
    positions are divided among context-parallel ranks, "row" for one of shape (B, ...), which all of them have whole.
    """

    columns: ClassVar[Mapping[str, Literal["token", "row"]]] = {}

    @abstractmethod
    def count(self, batch: Mapping[str, Any]) -> int:
        """Return the number of units in the arrays of `batch`."""

    @abstractmethod
    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        """Return the scalar loss of `batch`, given the log-probs (B, S) of its labels and the `units` of the step."""


class LinearObjective(Objective):
    """A weighted sum of log-probs, with weights known before the forward pass.

    The head then forms its gradient in the forward pass, and no log-probs are kept.
    """

    @abstractmethod
    def token_weights(self, batch: Mapping[str, Tensor], units: float) -> Tensor:
        """Return the weight of each label's log-prob in the loss, float32 (B, S), 0 where the label is `IGNORED`."""

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        """Return the weighted sum of `log_probs`."""
        return (self.token_weights(batch, units) * log_probs).sum()
