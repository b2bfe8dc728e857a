"""Rows of packed units: several examples in each row, every sequence a document of its own.

A sequence of n tokens takes n - 1 positions (see `positions_of`): inputs are its tokens except the last, labels its
tokens except the first. A label whose token is not trained is `IGNORED`. Position ids restart at each sequence, and
attention never crosses sequences, not even those of one unit: the model computes for each sequence exactly the losses
that it computes for the sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kumi.data.binfile import Array
from kumi.data.chat.masked import TRAINED
from kumi.data.packing.best_fit import Bins
from kumi.data.packing.unit_positions import SequenceTokens, Units, mean_sequence_span, positions_of
from kumi.data.row_source import LOSS_WEIGHTS, Batch
from kumi.errors import RefusedError
from kumi.objectives import IGNORED


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The units of `bins` as rows of `seq_len` positions."""

    source: Units
    bins: Bins
    seq_len: int

    @property
    def rows(self) -> int:
        return self.bins.rows

    @property
    def weighted(self) -> bool:
        return self.source.weighted

    @property
    def units(self) -> int:
        """Units in the rows of an epoch."""
        return len(self.bins.units)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the units in the rows of an epoch, each sequence's last token included."""
        return int(np.array(self.source.columns["tokens"])[self.bins.units].sum(dtype=np.int64))

    @cached_property
    def filled(self) -> float:
        """Share of the positions that are not padding."""
        return int(positions_of(self.source)[self.bins.units].sum(dtype=np.int64)) / (self.rows * self.seq_len)

    def mean_document_span(self) -> float:
        """Return the mean over positions, without padding, of the positions of their sequence."""
        return mean_sequence_span(self.source, self.seq_len)

    def units_of(self, row: int) -> Array:
        """Return the numbers of the units in row `row`, in their order."""
        return self.bins.units[self.bins.bounds[row] : self.bins.bounds[row + 1]]

    def fill(self, batch: Batch, at: Array, rows: Array) -> None:
        """Write the rows `rows` to the rows `at` of `batch`. Raise RefusedError when the units of a row overflow it."""
        for place, row in zip(at.tolist(), rows.tolist(), strict=True):
            read = [self.source.tokens_of(unit) for unit in self.units_of(row).tolist()]
            self._fill_row(batch, place, row, read)

    def _fill_row(self, batch: Batch, at: int, row: int, units: Sequence[SequenceTokens]) -> None:
        """Write `units`, those of row `row`, to the row `at` of `batch`."""
        lengths = np.concatenate([unit.lengths for unit in units]).astype(np.int64)
        lengths, ends = lengths - 1, np.cumsum(lengths)
        ids = np.concatenate([unit.ids for unit in units]).astype(np.int64)
        is_input, is_label = np.ones(len(ids), bool), np.ones(len(ids), bool)
        is_input[ends - 1], is_label[ends - lengths - 1] = False, False
        used = int(lengths.sum())
        if used > self.seq_len:
            raise RefusedError(
                f"{self.source.prefix}: row {row} of the packed rows has {used} tokens, more than {self.seq_len}: its "
                f"plan is damaged; remove {self.source.prefix.name}.bins.* and run the same command again"
            )
        trained = np.concatenate([unit.mask for unit in units]) & TRAINED != 0
        batch["input_ids"][at, :used] = ids[is_input]
        batch["labels"][at, :used] = np.where(trained, ids, IGNORED)[is_label]
        # Padding follows as one more document, so that its positions restart, too.
        lengths = np.append(lengths, self.seq_len - used)
        starts = np.cumsum(lengths) - lengths
        batch["position_ids"][at] = np.arange(self.seq_len) - np.repeat(starts, lengths)
        batch["document_ids"][at] = np.repeat(np.cumsum(lengths > 0) - 1, lengths)
        if self.source.weighted:
            weights = [np.ones(len(unit.ids), np.float32) if unit.weights is None else unit.weights for unit in units]
            batch[LOSS_WEIGHTS][at, :used] = np.concatenate(weights)[is_label]
