"""Rows of packed units: several units in each row, every sequence a document of its own.

A unit has one sequence, or two for the sides of a preference. A sequence of n tokens takes n - 1 positions (see
`positions_of`): inputs are its tokens except the last, labels its tokens except the first. A label whose token is not
trained is `IGNORED`. If sequences are scored (`RowForm.scored`), each takes n positions, and has one label, at its last
token. Position ids restart at each sequence, and attention never crosses sequences, not even those of one unit: the
model computes for each sequence exactly the losses that it computes for the sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kumi.data.binfile import Array
from kumi.data.chat.masked import TRAINED
from kumi.data.packing.best_fit import Bins
from kumi.data.packing.sequence_columns import write_reference, write_sequences, write_unit_records
from kumi.data.packing.unit_positions import SequenceTokens, Units, mean_sequence_span, positions_of
from kumi.data.row_source import LOSS_WEIGHTS, Batch
from kumi.errors import RefusedError
from kumi.objectives import IGNORED, LM_ROWS, MISMATCHED, RowForm


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The units of `bins` as rows of `seq_len` positions.

    form: how units become rows for the run's objective.
    reference: the reference model's log-probs, float64, one for each sequence of the source; None for an objective
        without a reference.
    mismatched_reference: log-probs of the mismatched sequences, from which KTO estimates its KL divergence (see
        `mismatched_of`), one for each unit.
    """

    source: Units
    bins: Bins
    seq_len: int
    form: RowForm = LM_ROWS
    reference: Array | None = None
    mismatched_reference: Array | None = None

    @property
    def rows(self) -> int:
        return self.bins.rows

    @property
    def weighted(self) -> bool:
        return self.source.weighted

    @property
    def referenced(self) -> bool:
        return self.reference is not None

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
        return int(positions_of(self.source, self.form)[self.bins.units].sum(dtype=np.int64)) / (
            self.rows * self.seq_len
        )

    def mean_document_span(self) -> float:
        """Return the mean over positions of the length of the position's sequence, without padding."""
        return mean_sequence_span(self.source, self.seq_len, self.form)

    def units_of(self, row: int) -> Array:
        """Return the numbers of the units in row `row`, in their order."""
        return self.bins.units[self.bins.bounds[row] : self.bins.bounds[row + 1]]

    def most_sequences(self, rows: Array) -> int:
        """Return the number of sequences in the fullest of the rows `rows` (n,)."""
        documents = self.source.columns["documents"]
        return max(int(documents[np.array(self.units_of(row))].sum()) for row in rows.tolist())

    def fill(self, batch: Batch, at: Array, rows: Array) -> None:
        """Write the rows `rows` to the rows `at` of `batch`. Raise RefusedError when the units of a row overflow it."""
        for place, row in zip(at.tolist(), rows.tolist(), strict=True):
            numbers = self.units_of(row).tolist()
            units = [self.source.tokens_of(number) for number in numbers]
            lengths = self._fill_row(batch, place, row, units)
            if self.source.weighted:
                self._write_weights(batch, place, units)
            if not self.form.sequences:
                continue
            write_sequences(batch, place, lengths, batch["labels"][place], IGNORED)
            records = self.source.columns[numbers]
            write_unit_records(batch, place, records)
            if self.reference is not None:
                documents = zip(records["first_document"].tolist(), records["documents"].tolist(), strict=True)
                log_probs = [self.reference[first : first + count] for first, count in documents]
                write_reference(batch, place, log_probs)
            if self.form.mismatched:
                self._fill_mismatched(batch, place, row, numbers, units)

    def mismatched_of(self, unit: int, tokens: SequenceTokens | None = None) -> SequenceTokens:
        """Return the prompt of unit number `unit` with the trained tokens of the unit before it in the source.

        `tokens`: the tokens of the unit, if they were read already.
        """
        tokens = self.source.tokens_of(unit) if tokens is None else tokens
        other = self.source.tokens_of((unit - 1) % len(self.source.columns))
        prompt = int(np.argmax(tokens.mask & TRAINED != 0))
        trained = other.mask & TRAINED != 0
        mask = np.concatenate([tokens.mask[:prompt], other.mask[trained]])
        ids = np.concatenate([tokens.ids[:prompt], other.ids[trained]])
        return _Sequence(ids, mask, None, np.array([len(ids)], np.int32))

    def _fill_mismatched(
        self, batch: Batch, at: int, row: int, numbers: Sequence[int], units: Sequence[SequenceTokens]
    ) -> None:
        """Write the mismatched sequences of the units `numbers` to row `at` of the columns of mismatched sequences."""
        mismatched = [self.mismatched_of(number, unit) for number, unit in zip(numbers, units, strict=True)]
        lengths = self._fill_row(batch, at, row, mismatched, MISMATCHED)
        write_sequences(batch, at, lengths, batch[f"{MISMATCHED}labels"][at], IGNORED, MISMATCHED)
        if self.mismatched_reference is not None:
            write_reference(batch, at, [self.mismatched_reference[numbers]], MISMATCHED)

    def _fill_row(self, batch: Batch, at: int, row: int, units: Sequence[SequenceTokens], prefix: str = "") -> Array:
        """Write the tokens of `units` to row `at` of those columns of `batch` whose names begin with `prefix`.

        row: the number of the packed row, for errors. Return the number of positions of each sequence, (sequences,).
        """
        ids = np.concatenate([unit.ids for unit in units]).astype(np.int64)
        trained = np.concatenate([unit.mask for unit in units]) & TRAINED != 0
        lengths = np.concatenate([unit.lengths for unit in units]).astype(np.int64)
        if self.form.scored:
            labels = np.full(len(ids), IGNORED, np.int64)
            labels[np.cumsum(lengths) - 1] = ids[np.cumsum(lengths) - 1]
        else:
            is_input, is_label = _shifted(lengths)
            ids, labels, lengths = ids[is_input], np.where(trained, ids, IGNORED)[is_label], lengths - 1
        used = len(ids)
        if used > self.seq_len:
            raise RefusedError(
                f"{self.source.prefix}: row {row} of the packed rows has {used} tokens, more than {self.seq_len}: the "
                f"plan of the rows is damaged; remove {self.source.prefix.name}.bins.* and run the same command again"
            )
        batch[f"{prefix}input_ids"][at, :used] = ids
        batch[f"{prefix}labels"][at, :used] = labels
        # Padding follows as one more document, so that its positions restart, too.
        padded = np.append(lengths, self.seq_len - used)
        starts = np.cumsum(padded) - padded
        batch[f"{prefix}position_ids"][at] = np.arange(self.seq_len) - np.repeat(starts, padded)
        batch[f"{prefix}document_ids"][at] = np.repeat(np.cumsum(padded > 0) - 1, padded)
        return lengths

    def _write_weights(self, batch: Batch, at: int, units: Sequence[SequenceTokens]) -> None:
        """Write the weights of the labels of `units` to the row `at`."""
        weights = [np.ones(len(unit.ids), np.float32) if unit.weights is None else unit.weights for unit in units]
        _, is_label = _shifted(np.concatenate([unit.lengths for unit in units]).astype(np.int64))
        values = np.concatenate(weights)[is_label]
        batch[LOSS_WEIGHTS][at, : len(values)] = values


@dataclass(frozen=True)
class _Sequence:
    """The tokens of one sequence, as `SequenceTokens`."""

    ids: Array
    mask: Array
    weights: Array | None
    lengths: Array


def _shifted(lengths: Array) -> tuple[Array, Array]:
    """Return which tokens of sequences of `lengths` tokens are inputs, and which are labels: all but the last and all
    but the first of each sequence."""
    stops = np.cumsum(lengths)
    is_input, is_label = np.ones(stops[-1], bool), np.ones(stops[-1], bool)
    is_input[stops - 1], is_label[stops - lengths] = False, False
    return is_input, is_label
