"""Rows of training data: the columns of a batch, and the interface of sources that fill its rows.

A source has a fixed number of rows. The mixture decides which row comes when (`kumi.data.sampler`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from kumi.data.binfile import Array
from kumi.objectives import IGNORED, RowForm

# A batch of token sequences: name -> array. "input_ids", "labels", "position_ids" and "document_ids" are (B, S); an
# objective may add arrays (B, ...). labels[b, s] is the token after input_ids[b, s], or `IGNORED` at the last token of
# a document, where the loss does not count the token, and in padding. Document ids count from 0 in each row; padding is
# a separate document. "loss_weights" (B, S), float32, is the weight of each label in the loss; without it all are 1.
Batch = Mapping[str, Array]
LOSS_WEIGHTS = "loss_weights"


class RowSource(Protocol):
    """Rows of one source of training data, each a pure function of its number.

    rows: rows of an epoch, at least 1.
    units, tokens: documents or examples in these rows, and their tokens, without padding.
    weighted: whether labels have weights other than 1. All batches of a mixture then have the column "loss_weights".
    form: the rows that the run's objective trains.
    referenced: whether the source has the reference model's log-probs. Batches then have columns for them.
    """

    @property
    def form(self) -> RowForm: ...

    @property
    def referenced(self) -> bool: ...

    @property
    def rows(self) -> int: ...

    @property
    def units(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def weighted(self) -> bool: ...

    def most_sequences(self, rows: Array) -> int:
        """Return the number of sequences in the fullest of the rows `rows` (n,); only for a form with sequences."""

    def fill(self, batch: Batch, at: Array, rows: Array) -> None:
        """Write the rows `rows` (n,) of this source, each in [0, self.rows), to the rows `at` (n,) of `batch`.

        `batch` is a result of `padding_rows`, so that a source need not write the weight of 1.
        """

    def mean_document_span(self) -> float:
        """Return the mean over tokens of the number of tokens that a token's document has in its row."""


def padding_rows(count: int, seq_len: int, *, weighted: bool = False, document: int = 0) -> Batch:
    """Return a batch of `count` rows of padding, which has the document id `document`."""
    shape = (count, seq_len)
    batch: dict[str, Array] = {
        "input_ids": np.zeros(shape, np.int64),
        "labels": np.full(shape, IGNORED, np.int64),
        "position_ids": np.tile(np.arange(seq_len), (count, 1)),
        "document_ids": np.full(shape, document, np.int32),
    }
    return batch | {LOSS_WEIGHTS: np.ones(shape, np.float32)} if weighted else batch
