"""The interface of an objective: the columns that it reads, the units that it counts, its loss as a function of
log-probs.

An objective is independent of the layout. Its loss is a sum over the units of a step (tokens, pairs, ...) divided by
their number over all ranks and microbatches. Every unit therefore has the same weight in any layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

# The label of a token without loss.
IGNORED = -100

# (x, segments, count) -> the sums (B, count) of `x` (B, S) over each of the `count` segments of a row. `segments` (B,
# S) numbers them. Under context parallelism, the sums are over complete rows.
SegmentSums = Callable[["Tensor", "Tensor", int], "Tensor"]


class Objective(ABC):
    """A loss whose terms may be any function of the log-probs of a row's labels.

    `columns`: the columns, other than labels, that only the objective reads. A "token" column is (B, S), and context
    parallelism shards its positions. A "row" column is (B, ...), and every rank has all of it. An objective may do
    without a column that no batch of a run has.
    """

    columns: ClassVar[Mapping[str, Literal["token", "row"]]] = {}

    @abstractmethod
    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of units in `batch`, or the sum of their weights."""

    @abstractmethod
    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        """Return the scalar loss of `batch`, given the log-probs (B, S) of its labels and the number of `units` in the
        step."""


class LinearObjective(Objective):
    """A weighted sum of log-probs, with weights that are known before the forward pass.

    The head can then compute its gradient in the forward pass, and keeps no log-probs.
    """

    @abstractmethod
    def token_weights(self, batch: Mapping[str, Tensor], units: float) -> Tensor:
        """Return the weight of each label's log-prob in the loss, float32 (B, S), 0 for ignored labels."""

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        """Return the weighted sum of `log_probs`."""
        return (self.token_weights(batch, units) * log_probs).sum()
