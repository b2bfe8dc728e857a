"""The columns of a batch that describe the sequences of its rows, for objectives that compare or score sequences.

See `kumi.objectives.SequenceObjective` for their meaning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kumi.data.binfile import Array
from kumi.data.row_source import Batch, RowSource, padding_rows
from kumi.objectives import MISMATCHED


def sequence_columns(count: int, seq_len: int, sequences: int, source: RowSource, document: int) -> Batch:
    """Return the columns of `count` rows of padding, of up to `sequences` sequences each, for rows like those of
    `source`.

    `document`: the document id of padding.
    """
    form = source.form
    columns = _columns(count, seq_len, sequences, source.referenced)
    if "preference" in form.kinds:
        columns["margins"] = np.zeros((count, sequences // 2), np.float32)
    if "feedback" in form.kinds:
        columns["desirable"] = np.zeros((count, sequences), np.int8)
    if form.mismatched:
        rows = padding_rows(count, seq_len, document=document)
        rows = {**rows, **_columns(count, seq_len, sequences, source.referenced)}
        columns |= {MISMATCHED + name: column for name, column in rows.items()}
    return columns


def _columns(count: int, seq_len: int, sequences: int, referenced: bool) -> dict[str, Array]:
    """Return the columns that rows of every kind have, filled for padding."""
    columns: dict[str, Array] = {
        "segments": np.zeros((count, seq_len), np.int64),
        "trained": np.zeros((count, sequences), np.int64),
    }
    return columns | {"reference": np.zeros((count, sequences), np.float64)} if referenced else columns


def write_sequences(batch: Batch, at: int, lengths: Array, labels: Array, ignored: int, prefix: str = "") -> None:
    """Write the columns "segments" and "trained" of row `at`: sequences of `lengths` positions with `labels` (S,)."""
    segments = np.repeat(np.arange(len(lengths)), lengths)
    batch[f"{prefix}segments"][at, : len(segments)] = segments
    trained = np.bincount(segments, labels[: len(segments)] != ignored, len(lengths))
    batch[f"{prefix}trained"][at, : len(lengths)] = trained


def write_unit_records(batch: Batch, at: int, records: Array) -> None:
    """Write to row `at` the margins of pairs, or which replies are desirable, from the `records` of its units."""
    if "margins" in batch:
        batch["margins"][at, : len(records)] = np.nan_to_num(np.asarray(records["margin"]), nan=0.0)
    if "desirable" in batch:
        batch["desirable"][at, : len(records)] = np.asarray(records["label"]) == 1


def write_reference(batch: Batch, at: int, log_probs: Sequence[Array], prefix: str = "") -> None:
    """Write the reference log-probs of the sequences of row `at`, given for each unit."""
    values = np.concatenate(log_probs)
    batch[f"{prefix}reference"][at, : len(values)] = values
