"""The units that packing reads, and the number of positions that each takes in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from kumi.data.binfile import Array, IndexedFile
from kumi.objectives import LM_ROWS, RowForm


class SequenceTokens(Protocol):
    """The tokens of a unit's sequences, one after another.

    ids, mask, weights: one value a token; weights is None if all are 1. See `kumi.data.chat.masked`.
    lengths: tokens of each sequence.
    """

    @property
    def ids(self) -> Array: ...
    @property
    def mask(self) -> Array: ...
    @property
    def weights(self) -> Array | None: ...
    @property
    def lengths(self) -> Array: ...


class Units(Protocol):
    """Units of examples, each of one sequence or more.

    prefix: the path of the files of the units, without their suffixes.
    kind: the kind of the rows of data that became units.
    file: the sequences of all units in order; document n is sequence n.
    columns: one record for each unit, with the fields of `kumi.data.unit_files.UNIT_COLUMNS`, except "digest".
    weighted: whether a token has a weight other than 1.
    """

    @property
    def prefix(self) -> Path: ...
    @property
    def kind(self) -> str: ...
    @property
    def file(self) -> IndexedFile: ...
    @property
    def columns(self) -> Array: ...
    @property
    def weighted(self) -> bool: ...

    def tokens_of(self, unit: int) -> SequenceTokens:
        """Return the tokens of unit number `unit`."""


def positions_of(units: Units, form: RowForm = LM_ROWS) -> Array:
    """Return the positions of a row that each unit takes, int32 (units,).

    The last token of a sequence is a label only, never an input, so a sequence of n tokens takes n - 1 positions. The
    tokens of a prompt are all inputs: a model continues it. So are those of a sequence that is scored. An objective
    with mismatched sequences (KTO) has a second row, in which the same positions have the unit's prompt with the reply
    of the unit before; a unit takes the positions of the longer of these two sequences.
    """
    tokens = np.array(units.columns["tokens"], np.int32)
    if units.kind == "prompt" or form.scored:
        return tokens
    positions = tokens - np.array(units.columns["documents"], np.int32)
    if form.mismatched:
        trained = np.array(units.columns["trained"], np.int32)
        positions = np.maximum(positions, positions - trained + np.roll(trained, 1))
    return positions


def mean_sequence_span(units: Units, seq_len: int, form: RowForm = LM_ROWS) -> float:
    """Return the mean over positions of the length of the position's sequence, for units that fit a row.

    A row has `seq_len` positions. No sequence is split, so it does not matter which units share a row. Padding is not
    counted. The mean is `seq_len` if nothing fits.
    """
    fits = positions_of(units, form) <= seq_len
    lengths = np.array(units.file.lengths[: int(units.columns["documents"].sum(dtype=np.int64))], np.float64)
    if units.kind != "prompt" and not form.scored:
        lengths -= 1  # the last token takes no position
    lengths = lengths[np.repeat(fits, units.columns["documents"])]
    total = float(lengths.sum())
    return float((lengths**2).sum()) / total if total else float(seq_len)
