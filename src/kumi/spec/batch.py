"""The batch: the tokens of a step, and their division into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

from kumi.spec.layout import Layout


@dataclass(frozen=True)
class BatchSpec:
    """A step trains on `tokens_per_step` tokens over all ranks, in sequences of `seq_len` tokens."""

    seq_len: int
    tokens_per_step: int

    @property
    def sequences(self) -> int:
        """Sequences of a step, over all ranks."""
        return self.tokens_per_step // self.seq_len

    @overload
    def microbatches(self, layout: Layout) -> int: ...
    @overload
    def microbatches(self, layout: Any) -> Any: ...
    def microbatches(self, layout: Any) -> Any:
        """Return the number of microbatches that each data-parallel rank runs in a step.

        It is an int for a `Layout`, and an array for `kumi.plan.layout_batch.LayoutBatch`.
        """
        return self.sequences // (layout.dp * layout.microbatch)
