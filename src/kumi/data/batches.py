"""Where a run's batches come from: one batch a step, and what a checkpoint stores to go on with the same batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kumi.data.sampler import Batch, Mixture


class BatchSource(Protocol):
    """The batches of one rank. Steps count from 0; ranks that share a replica of the model get equal batches."""

    def at(self, step: int) -> Batch:
        """Return this rank's sequences of `step`. A step may be asked for again, when an update of it was not done."""

    def state(self, step: int) -> Mapping[str, Any]:
        """Return what a checkpoint of `step` updates stores, as JSON: equal on all ranks, and enough to go on with
        `at(step)` exactly, under another layout, too. The batch of `step` may have been asked for already."""


@dataclass(frozen=True)
class MixtureSource:
    """Consecutive sequences of a mixture: `sequences` per step, dealt to `ranks` data-parallel ranks.

    Rank `index` gets its share of each step. Step `first_step` begins with the sequence `first_sequence`.
    """

    mixture: Mixture
    sequences: int
    index: int = 0
    ranks: int = 1
    first_step: int = 0
    first_sequence: int = 0

    def at(self, step: int) -> Batch:
        """Return this rank's sequences of `step`."""
        share = self.sequences // self.ranks
        return self.mixture.batch(self._begin(step) + self.index * share, share)

    def state(self, step: int) -> dict[str, Any]:
        """Return how many sequences of the mixture the steps before `step` trained on."""
        return {"sequences": self._begin(step)}

    def _begin(self, step: int) -> int:
        """Return the number of the first sequence of `step`."""
        return self.first_sequence + (step - self.first_step) * self.sequences
