"""The interface of an objective: the rows and columns that it reads, the units that it counts, its loss as a function
of log-probs.

An objective is independent of the layout. Its loss is a sum over the units of a step (tokens, pairs, ...) divided by
their number over all ranks and microbatches. Every unit therefore has the same weight in any layout.

The fields of an objective's dataclass are its options, the keys of the section [objective] of a run file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kumi.objectives.row_form import LM_ROWS, RowForm

if TYPE_CHECKING:
    from torch import Tensor

# The label of a token without loss.
IGNORED = -100

# (x, segments, count) -> the sums (B, count) of `x` (B, S) over each of the `count` segments of a row. `segments` (B,
# S): the segment of each position, from 0. Under context parallelism, the sums are over complete rows.
SegmentSums = Callable[["Tensor", "Tensor", int], "Tensor"]


class Objective(ABC):
    """A loss whose terms may be any function of the log-probs of a row's labels.

    `columns`: the columns, other than labels, that only the objective reads. A "token" column is (B, S), and context
    parallelism shards its positions. A "row" column is (B, ...), and every rank has all of it. Some columns may be
    missing, but then from all batches of a run.
    `rows`: the rows of data that the objective trains.
    `unit`: the word for its units, in the plural.
    `reference`: True if the loss compares the policy with a reference model.
    `head`: the head of the model: "lm" for log-probs of labels, "score" for one number at each label.
    `metrics`: names of the numbers that its `measure` returns, if it has one.
    `usual_lr`: the default peak learning rate of a run that trains all weights of a pretrained model; None if the
    objective has no rate of its own.
    """

    columns: ClassVar[Mapping[str, Literal["token", "row"]]] = {}
    rows: ClassVar[RowForm] = LM_ROWS
    unit: ClassVar[str] = "tokens"
    reference: ClassVar[bool] = False
    head: ClassVar[Literal["lm", "score"]] = "lm"
    metrics: ClassVar[tuple[str, ...]] = ()
    usual_lr: ClassVar[float | None] = None

    @property
    def reads_reference(self) -> bool:
        """Return True if log-probs of a reference model are needed, stored ones or those of every rollout batch."""
        return self.reference

    @property
    def needs_old_log_probs(self) -> bool:
        """Return True if a run with rollouts needs log-probs by the policy that began a batch even for a single update,
        because advantages depend on them. Ratios need them for further updates on the batch only."""
        return False

    @property
    def trains_critic(self) -> bool:
        """Return True if a second model, a critic, is trained beside the policy (see `kumi.objectives.ppo`)."""
        return False

    @abstractmethod
    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of units in `batch`, or the sum of their weights."""

    def tokens(self, batch: Mapping[str, Any]) -> int:
        """Return the number of trained tokens in `batch`, which a run reports: by default those with a label."""
        return int((batch["labels"] != IGNORED).sum())

    @abstractmethod
    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        """Return the scalar loss of `batch`, given the log-probs (B, S) of its labels and the number of `units` in the
        step."""


class LinearObjective(Objective):
    """A weighted sum of log-probs, with weights that are known before the forward pass.

    The head can then compute its gradient in the forward pass, and keeps no log-probs.

    `evaluated`: the means over trained tokens that an evaluation reports beside the loss: the "entropy" of the
    prediction in nats, and "mean_token_accuracy", the share of labels that are the most probable token.
    """

    evaluated: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def token_weights(self, batch: Mapping[str, Tensor], units: float) -> Tensor:
        """Return the weight of each label's log-prob in the loss, float32 (B, S), 0 for ignored labels."""

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        """Return the weighted sum of `log_probs`."""
        return (self.token_weights(batch, units) * log_probs).sum()


class TokenObjective(Objective):
    """A loss of the log-probs of single tokens, with metrics."""

    @abstractmethod
    def measure(self, log_probs: Tensor, batch: Mapping[str, Tensor], sums: SegmentSums) -> Tensor:
        """Return a sum over complete rows and the number of its terms for each of `metrics`, float64 (len(metrics), 2).

        A metric of a step is the sum over all ranks and microbatches, divided by the number of terms.
        """


class SequenceObjective(Objective):
    """A loss that depends on the log-probs only through their sums over the sequences of a row.

    Columns of a batch, for rows of up to G sequences:

    segments (B, S): number of the sequence of each position.
    trained (B, G): number of trained tokens of each sequence, 0 for sequences that a row does not have.
    reference (B, G): sum of the reference model's log-probs over each sequence's trained tokens.
    margins (B, G / 2): of preference rows, the margin of each pair; 0 where a row gives none.
    desirable (B, G): of feedback rows, 1 for a desirable completion, else 0.
    statistics (2,): sums over the step, see `MismatchedObjective`.

    Mismatched rows have these columns, and those of the decoder, under names that begin with "mismatched_".
    """

    columns: ClassVar[Mapping[str, Literal["token", "row"]]] = {
        "segments": "token",
        "trained": "row",
        "reference": "row",
        "margins": "row",
        "desirable": "row",
    }

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        """Return `sequence_loss` of the sums of `log_probs`, in the dtype of `log_probs`."""
        return self.sequence_loss(sequence_sums(log_probs, batch, sums), batch, units).to(log_probs.dtype)

    @abstractmethod
    def sequence_loss(self, totals: Tensor, batch: Mapping[str, Tensor], units: float) -> Tensor:
        """Return the scalar loss of `batch`, given the sums (B, G) of the log-probs of its sequences, float64."""

    @abstractmethod
    def measure(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a sum and the number of its terms for each of `metrics`, float64 (len(metrics), 2).

        A metric of a step is the sum over all ranks and microbatches, divided by the number of terms.
        """


class MismatchedObjective(SequenceObjective):
    """An objective whose rows are `mismatched`: its loss also depends on sums over the mismatched rows of the step."""

    @abstractmethod
    def statistics(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return sums (2,) over `batch`, given the sums (B, G) of the log-probs of its mismatched sequences.

        Their total over the step, without a gradient, is the column "statistics".
        """


def sequence_sums(log_probs: Tensor, batch: Mapping[str, Tensor], sums: SegmentSums, prefix: str = "") -> Tensor:
    """Return the sums (B, G) of `log_probs` (B, S) over sequences, in float64: a loss takes differences of large sums.

    `prefix`: the prefix of the names of the columns that number the sequences; "mismatched_" for mismatched rows.
    """
    return sums(log_probs.double(), batch[f"{prefix}segments"], batch[f"{prefix}trained"].shape[1])
