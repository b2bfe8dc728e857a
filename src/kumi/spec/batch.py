"""How many tokens make a step, and how they are cut into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

from kumi.spec.layout import Layout


@dataclass(frozen=True)
class BatchSpec:
    """A step trains on `tokens_per_step` tokens, in sequences of `seq_len`, over all ranks."""

    seq_len: int
    tokens_per_step: int

    @property
    def sequences(self) -> int:
        """Sequences in a step, over all ranks."""
        return self.tokens_per_step // self.seq_len

    @overload
    def microbatches(self, layout: Layout) -> int: ...
    @overload
    def microbatches(self, layout: Any) -> Any: ...
    def microbatches(self, layout: Any) -> Any:
        """Return the forward-backward units that each data-parallel rank runs in a step: an int for one layout, an
        array for `kumi.plan.layout_batch.LayoutBatch`."""
        return self.sequences // (layout.dp * layout.microbatch)
