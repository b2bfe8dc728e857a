"""The batch: the tokens of a step, their division into microbatches, and the documents that attention stays within."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Any, overload

from kumi.spec.layout import Layout


@dataclass(frozen=True)
class BatchSpec:
    """A step trains on `tokens_per_step` tokens over all ranks, in sequences (rows) of `seq_len` tokens.

    `document_span`: the mean over tokens of the number of tokens that a token's document has in its row: the mean of
        the squared lengths of documents over their mean length, after rows cut them. It is `seq_len` if attention
        crosses the documents of a row, and None if the lengths of the documents are unknown.
    """

    seq_len: int
    tokens_per_step: int
    document_span: float | None = None

    @property
    def attention_len(self) -> float:
        """The length of equal rows of one document each in which attention costs as much per token as in this batch."""
        return self.seq_len if self.document_span is None else self.document_span

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


def span_of_documents(mean_tokens: float, seq_len: int) -> float:
    """Return the `BatchSpec.document_span` of documents of `mean_tokens` on average, in rows of `seq_len` tokens.

    Lengths are taken to be distributed exponentially, as if every token ended its document with equal probability.
    Of the document of the token at position x of a row, mean * (1 - exp(-x / mean)) tokens then lie before that token,
    on average; for those after it, x is the distance from the end of the row.
    """
    share = mean_tokens / seq_len
    return 2 * mean_tokens * (1 - share * (1 - exp(-1 / share)))
