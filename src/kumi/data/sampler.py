"""Sample training sequences from sources of rows: sequence n is a pure function of (data, seed, n), in constant time.

    n -> part, by shares that are exact in every block of 256 (`kumi.data.interleaving`) -> draw k from that part
      -> epoch k // rows, row = permutation(k % rows) of the part

A part is one source: the windows of a token file (`kumi.data.text_windows`), or packed rows (`kumi.data.packing`). Each
epoch of a part has a new order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from kumi.data.binfile import Array, IndexedFile
from kumi.data.feistel import key, permute
from kumi.data.interleaving import Interleaving, by_counts, by_weights
from kumi.data.packing.sequence_columns import sequence_columns
from kumi.data.row_source import Batch, RowSource, padding_rows
from kumi.data.text_windows import TextWindows
from kumi.errors import ConfigError

BY = ("tokens", "sequences")


@dataclass(frozen=True, eq=False)
class Mixture:
    """An endless mixture of sources.

    parts: sources with their weights. A token file stands for its windows.
    cross_document: attend and predict across document boundaries of text, as Megatron does.
    by: weights are shares of the "tokens", or of the "sequences": documents or examples.
    epochs: how often an epoch of the mixture reads each source, instead of the weights; the number of its rows is
        rounded, and at least 1.
    """

    parts: Sequence[tuple[IndexedFile | RowSource, float]]
    seq_len: int
    seed: int = 0
    cross_document: bool = False
    by: str = "tokens"
    epochs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise ConfigError(f"a mixture by {self.by!r} must be one by {' or '.join(BY)}")
        _ = self.interleaving  # refuses wrong parts here, not at the first batch

    @cached_property
    def sources(self) -> list[RowSource]:
        """The rows of each part."""
        return _row_sources((source for source, _ in self.parts), self.seq_len, self.cross_document)

    @cached_property
    def interleaving(self) -> Interleaving:
        """The part of each sequence."""
        if self.epochs is None:
            return by_weights(
                [self._row_weight(*each) for each in zip(self.sources, self.parts, strict=True)], self.seed
            )
        pairs = zip(self.sources, self.epochs, strict=True)
        return by_counts([max(1, round(source.rows * epochs)) for source, epochs in pairs], self.seed)

    @property
    def round(self) -> int:
        """Sequences of an epoch of the mixture; 0 unless it is given by `epochs`."""
        return self.interleaving.round

    def batch(self, start: int, count: int) -> Batch:
        """Return the sequences [start, start + count)."""
        part, _, row = self.locate(start, count)
        return _batch(self.sources, part, row, self.seq_len, self.cross_document)

    def locate(self, start: int, count: int) -> tuple[Array, Array, Array]:
        """Return part, epoch and row of the sequences [start, start + count), each (count,)."""
        part, draw = self.interleaving.draws(start, count)
        epoch, row = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for number, source in enumerate(self.sources):
            mask = part == number
            size = source.rows
            epoch[mask] = draw[mask] // size
            keys = key(self.seed, 1, number, epoch[mask])
            row[mask] = permute(draw[mask] % size, size, keys)
        return part, epoch, row

    def _row_weight(self, source: RowSource, part: tuple[IndexedFile | RowSource, float]) -> float:
        """Return the share of `source` in the rows, relative to the others."""
        if self.by == "sequences":
            # A row has units / rows of them.
            return part[1] * source.rows / source.units
        # Windows of text are full, except the last, so the shares of tokens are those of rows; packed rows have gaps.
        return part[1] if isinstance(source, TextWindows) else part[1] * source.rows * self.seq_len / source.tokens


@dataclass(frozen=True, eq=False)
class SequentialSampler:
    """The validation set: all rows of the sources in order, each once; len() is their number.

    limit: if greater than 0 and below the number of rows, use this many rows, evenly spaced over all sources, and also
        the first row of each source that has none of them.
    """

    parts: Sequence[IndexedFile | RowSource]
    seq_len: int
    cross_document: bool = False
    limit: int = 0

    def __post_init__(self) -> None:
        _ = self.sources  # refuses wrong parts here, not at the first batch

    @cached_property
    def sources(self) -> list[RowSource]:
        """The rows of each part."""
        return _row_sources(self.parts, self.seq_len, self.cross_document)

    @cached_property
    def _ends(self) -> Array:
        """The number of rows up to the end of each source, without a limit."""
        return np.cumsum([source.rows for source in self.sources])

    @cached_property
    def _chosen(self) -> Array | None:
        """The rows of the sequences under a limit, in order; None without one."""
        total = int(self._ends[-1])
        if not 0 < self.limit < total:
            return None
        spaced = np.arange(self.limit) * total // self.limit
        begins = np.concatenate([[0], self._ends[:-1]])
        absent = begins[np.searchsorted(spaced, begins) == np.searchsorted(spaced, self._ends)]
        return np.sort(np.concatenate([spaced, absent]))

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The first sequence of each source, and the one after its last."""
        ends = self._ends if self._chosen is None else np.searchsorted(self._chosen, self._ends)
        return list(pairwise([0, *ends.tolist()]))

    def __len__(self) -> int:
        return self.spans[-1][1]

    def batch(self, start: int, count: int, stop: int | None = None) -> Batch:
        """Return the sequences [start, start + count); from `stop` on, by default past the last one, rows are
        padding."""
        ends, stop = self._ends, len(self) if stop is None else min(stop, len(self))
        numbers = np.arange(start, start + count)
        padding = numbers >= stop
        numbers = np.where(padding, 0, numbers)
        if self._chosen is not None:
            numbers = self._chosen[numbers]
        part = np.where(padding, len(ends), np.searchsorted(ends, numbers, side="right"))
        row = numbers - np.concatenate([[0], ends, [0]])[part]
        return _batch(self.sources, part, row, self.seq_len, self.cross_document)


def _row_sources(parts: Iterable[IndexedFile | RowSource], seq_len: int, cross_document: bool) -> list[RowSource]:
    """Return the rows of each part. Raise ConfigError when there is none, or a wrong `seq_len`."""
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} must be at least 1")
    sources = [TextWindows(p, seq_len, cross_document) if isinstance(p, IndexedFile) else p for p in parts]
    if not sources:
        raise ConfigError("a mixture needs at least one token file")
    return sources


def _batch(sources: Sequence[RowSource], part: Array, row: Array, seq_len: int, cross_document: bool) -> Batch:
    """Return the batch of row `row[b]` of source `part[b]`; a part past the last source gives a row of padding."""
    weighted, form = any(source.weighted for source in sources), sources[0].form
    places = [np.flatnonzero(part == number) for number in range(len(sources))]
    used = [(source, at) for source, at in zip(sources, places, strict=True) if len(at)]
    # The number of the document that padding counts as: with documents apart, padding is one of its own.
    document = 0 if cross_document else 1
    batch = padding_rows(len(part), seq_len, weighted=weighted, document=document)
    if form.sequences:
        # At least two, so that rows of padding alone have room for a pair. All sources of a run have the same form.
        most = max((source.most_sequences(row[at]) for source, at in used), default=0)
        batch = {**batch, **sequence_columns(len(part), seq_len, max(2, most), sources[0], document)}
    for source, at in used:
        source.fill(batch, at, row[at])
    return batch
