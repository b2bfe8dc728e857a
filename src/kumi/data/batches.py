"""The source of a run's batches: one batch per step, and the data in a checkpoint with which a resume continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kumi.data.row_source import Batch
from kumi.data.sampler import Mixture


class BatchSource(Protocol):
    """The batches of one rank. Steps count from 0; all ranks of one model replica get the same batches."""

    def at(self, step: int) -> Batch:
        """Return this rank's sequences of `step`. The caller may ask for a step again if its update was not done."""

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the JSON data of this source for a checkpoint after `step` updates.

        It is the same on all ranks, and enough to continue with exactly `at(step)`, also under another layout. The
        caller may have asked for the batch of `step` already.
        """


@dataclass(frozen=True)
class MixtureSource:
    """Consecutive sequences of a mixture: `sequences` per step, split over `ranks` data-parallel ranks.

    This rank is number `index` of them. Step `first_step` begins with the sequence `first_sequence`.
    """

    mixture: Mixture
    sequences: int
    index: int = 0
    ranks: int = 1
    first_step: int = 0
    first_sequence: int = 0

    def at(self, step: int) -> Batch:
        """Return this rank's sequences of `step`."""
        count = self.sequences // self.ranks
        return self.mixture.batch(self._begin(step) + self.index * count, count)

    def state(self, step: int) -> dict[str, Any]:
        """Return how many sequences of the mixture the steps before `step` trained on."""
        return {"sequences": self._begin(step)}

    def _begin(self, step: int) -> int:
        """Return the number of the first sequence of `step`."""
        return self.first_sequence + (step - self.first_step) * self.sequences
