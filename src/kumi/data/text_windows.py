"""Rows of text: consecutive windows of a token file.

A file has ceil((tokens - 1) / S) windows. Window w has the inputs [w * S, w * S + S) and labels one token further, so
each token except the first is the label of exactly one window. The last window is padded with labels of -100, so no
token is dropped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kumi.data.binfile import Array, IndexedFile
from kumi.data.row_source import Batch
from kumi.errors import ConfigError
from kumi.objectives import IGNORED, LM_ROWS, RowForm

# Rows on which the mean span of documents is measured: enough for a few percent, and read in a fraction of a second.
_SPAN_WINDOWS = 1024


@dataclass(frozen=True, eq=False)
class TextWindows:
    """The windows of a token file as rows.

    cross_document: attend and predict across document boundaries, as Megatron does.
    weighted, form, referenced: as in `kumi.data.row_source.RowSource`.
    """

    file: IndexedFile
    seq_len: int
    cross_document: bool = False
    weighted: bool = False
    form: RowForm = LM_ROWS
    referenced: bool = False

    def __post_init__(self) -> None:
        if self.file.token_count < 2:
            raise ConfigError(
                f"{self.file.prefix}.bin: has {self.file.token_count} tokens, but a training sequence needs at least "
                "2; add documents"
            )

    @property
    def rows(self) -> int:
        return windows(self.file, self.seq_len)

    @property
    def units(self) -> int:
        return self.file.document_count

    @property
    def tokens(self) -> int:
        return self.file.token_count

    def mean_document_span(self) -> float:
        """Return the mean span of documents in these rows; whole rows when attention crosses documents."""
        return float(self.seq_len) if self.cross_document else mean_document_span(self.file, self.seq_len)

    def most_sequences(self, rows: Array) -> int:
        """Raise AssertionError: no objective that compares sequences trains text."""
        raise AssertionError("windows of text have no sequences")

    def fill(self, batch: Batch, at: Array, rows: Array) -> None:
        """Write the windows `rows` to the rows `at` of `batch`."""
        count, seq_len = len(rows), self.seq_len
        tokens = np.zeros((count, seq_len + 1), np.int64)
        is_start = np.zeros((count, seq_len + 1), bool)
        starts = rows * seq_len
        valid = np.minimum(self.file.token_count - starts, seq_len + 1)  # tokens of each row before its padding
        for row, (start, length) in enumerate(zip(starts, valid, strict=True)):
            tokens[row, :length] = self.file.read(start, start + length)
        positions = np.arange(seq_len + 1)
        padding = positions >= valid[:, None]
        if not self.cross_document:
            _mark_documents(self.file, starts, valid, is_start)
            # The last token of a short window is a label only, so the padding document starts right after it.
            is_start |= positions == valid[:, None]
        document_starts = np.where(is_start, positions, 0)[:, :seq_len]
        batch["input_ids"][at] = tokens[:, :seq_len]
        batch["labels"][at] = np.where(padding[:, 1:] | is_start[:, 1:], IGNORED, tokens[:, 1:])
        batch["position_ids"][at] = positions[:seq_len] - np.maximum.accumulate(document_starts, axis=1)
        batch["document_ids"][at] = np.cumsum(is_start[:, :seq_len], axis=1, dtype=np.int32)


def windows(file: IndexedFile, seq_len: int) -> int:
    """Return the number of windows of `file`; its last token is a label only, never an input."""
    return -(-(file.token_count - 1) // seq_len)


def mean_document_span(file: IndexedFile, seq_len: int) -> float:
    """Return the mean over tokens of the number of tokens that a token's document has in its row of `seq_len`.

    It is measured on at most `_SPAN_WINDOWS` rows at even distances.
    """
    count = windows(file, seq_len)
    chosen = np.unique(np.linspace(0, count - 1, min(count, _SPAN_WINDOWS)).astype(np.int64))
    stops = np.minimum((chosen + 1) * seq_len, file.token_count)
    firsts, lasts = file.document_at(chosen * seq_len), file.document_at(stops - 1)
    squares = 0.0
    for window, stop, first, last in zip(chosen, stops, firsts, lasts, strict=True):
        inner = file.starts(np.arange(first + 1, last + 1))
        squares += float((np.diff(inner, prepend=window * seq_len, append=stop).astype(np.float64) ** 2).sum())
    return squares / float((stops - chosen * seq_len).sum())


def _mark_documents(file: IndexedFile, starts: Array, valid: Array, is_start: Array) -> None:
    """Set `is_start` (B, S + 1) at each document start inside the windows, except at their first tokens.

    `starts` and `valid` are the first token and the number of tokens of each window.
    """
    documents_at = file.document_at(np.concatenate([starts, starts + valid - 1]))
    first, last = documents_at[: len(starts)] + 1, documents_at[len(starts) :] + 1
    counts = last - first
    row = np.repeat(np.arange(len(starts)), counts)
    documents = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]
    is_start[row, file.starts(documents) - starts[row]] = True
