"""Sample training sequences from sources of rows: sequence n is a pure function of (data, seed, n), in constant time.

    n -> part, by weights that are exact in every block of 256 -> draw k from that part
      -> epoch k // rows, row = permutation(k % rows) of the part

A part is one source: the windows of a token file (`kumi.data.text_windows`), or packed rows (`kumi.data.packing`). Each
epoch of a part has a new order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kumi.data.binfile import Array, IndexedFile
from kumi.data.feistel import key, permute
from kumi.data.row_source import Batch, RowSource, padding_rows
from kumi.data.text_windows import TextWindows
from kumi.errors import ConfigError

_BLOCK = 256
_ONE = 1 << 32


@dataclass(frozen=True, eq=False)
class Mixture:
    """An endless weighted mixture of sources.

    parts: sources with their weights; the number of sequences from a source is proportional to its weight. A token file
        stands for its windows.
    cross_document: attend and predict across document boundaries of text, as Megatron does.
    """

    parts: Sequence[tuple[IndexedFile | RowSource, float]]
    seq_len: int
    seed: int = 0
    cross_document: bool = False

    def __post_init__(self) -> None:
        if any(not weight > 0 for _, weight in self.parts):
            raise ConfigError(f"mixture weights {[weight for _, weight in self.parts]} must all be greater than 0")
        _ = self.sources  # refuses wrong parts here, not at the first batch

    @cached_property
    def sources(self) -> list[RowSource]:
        """The rows of each part."""
        return _row_sources((source for source, _ in self.parts), self.seq_len, self.cross_document)

    def batch(self, start: int, count: int) -> Batch:
        """Return the sequences [start, start + count)."""
        part, _, row = self.locate(start, count)
        return _batch(self.sources, part, row, self.seq_len, self.cross_document)

    def locate(self, start: int, count: int) -> tuple[Array, Array, Array]:
        """Return part, epoch and row of the sequences [start, start + count), each (count,)."""
        part, draw = self._draws(start, count)
        epoch, row = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for number, source in enumerate(self.sources):
            mask = part == number
            size = source.rows
            epoch[mask] = draw[mask] // size
            keys = key(self.seed, 1, number, epoch[mask])
            row[mask] = permute(draw[mask] % size, size, keys)
        return part, epoch, row

    def _draws(self, start: int, count: int) -> tuple[Array, Array]:
        """Return the part of each sequence, and the number of earlier sequences from that part.

        The parts form a chain. A part with fraction p takes the m-th sequence that reaches it if floor(m * p) increases
        at m, and passes the other sequences to the next part. After each complete block, the sequences of every part
        are therefore exact to within one or two, and no state is needed. The sequences of a block arrive in shuffled
        order, so that the parts do not alternate in step with the ranks.
        """
        first = start - start % _BLOCK
        numbers = np.arange(first, -(-(start + count) // _BLOCK) * _BLOCK, dtype=np.uint64)
        block, offset = numbers // np.uint64(_BLOCK), numbers % np.uint64(_BLOCK)
        arrivals = block * np.uint64(_BLOCK) + permute(offset, _BLOCK, key(self.seed, 0, block))
        part, draw = np.full(len(numbers), -1, np.int64), np.zeros(len(numbers), np.int64)
        for number, (fraction, drawn) in enumerate(zip(self._fractions(), self._drawn_before(first), strict=True)):
            before = _scale(arrivals, fraction)
            taken = (part < 0) & (_scale(arrivals + np.uint64(1), fraction) > before)
            part[taken] = number
            draw[taken] = drawn + np.arange(np.count_nonzero(taken))
            arrivals = arrivals - before
        requested = slice(start - first, start - first + count)
        return part[requested], draw[requested]

    def _drawn_before(self, number: int) -> list[int]:
        """Return the sequences of each part among the first `number` sequences, a multiple of the block size."""
        result, remaining = [], np.array([number], np.uint64)
        for fraction in self._fractions():
            taken = _scale(remaining, fraction)
            remaining = remaining - taken
            result.append(int(taken[0]))
        return result

    def _fractions(self) -> list[int]:
        """Return the fraction that each part takes of the sequences that reach it, in units of 2^-32.

        For part i it is weight[i] / sum(weight[i:]). The last part takes all sequences that reach it.
        """
        weights = [weight for _, weight in self.parts]
        remaining = [sum(weights[number:]) for number in range(len(weights))]
        fractions = [min(max(round(w / r * _ONE), 1), _ONE - 1) for w, r in zip(weights, remaining, strict=True)]
        return [*fractions[:-1], _ONE]


@dataclass(frozen=True, eq=False)
class SequentialSampler:
    """The validation set: all rows of the sources in order, each once; len() is their number.

    limit: if greater than 0, use at most this many rows, evenly spaced over all sources.
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

    def __len__(self) -> int:
        total = sum(source.rows for source in self.sources)
        return min(self.limit, total) if self.limit else total

    def batch(self, start: int, count: int) -> Batch:
        """Return the sequences [start, start + count); rows past the last sequence are padding."""
        ends = np.cumsum([source.rows for source in self.sources])
        numbers = np.arange(start, start + count)
        if len(self) < ends[-1]:
            numbers = np.where(numbers < len(self), numbers * ends[-1] // len(self), ends[-1])
        part = np.searchsorted(ends, numbers, side="right")
        row = numbers - np.concatenate([[0], ends])[part]
        return _batch(self.sources, part, row, self.seq_len, self.cross_document)


def _row_sources(parts: Iterable[IndexedFile | RowSource], seq_len: int, cross_document: bool) -> list[RowSource]:
    """Return the rows of each part. Raise ConfigError when there is none, or a wrong `seq_len`."""
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} must be at least 1")
    sources = [TextWindows(p, seq_len, cross_document) if isinstance(p, IndexedFile) else p for p in parts]
    if not sources:
        raise ConfigError("a mixture needs at least one token file")
    return sources


def _scale(values: Array, fraction: int) -> Array:
    """Return floor(values * fraction / 2^32), exact for values up to 2^63."""
    low = (
        (values & np.uint64(_ONE - 1)) * np.uint64(fraction)
        if fraction < _ONE
        else (values & np.uint64(_ONE - 1)) << np.uint64(32)
    )
    return (values >> np.uint64(32)) * np.uint64(fraction) + (low >> np.uint64(32))


def _batch(sources: Sequence[RowSource], part: Array, row: Array, seq_len: int, cross_document: bool) -> Batch:
    """Return the batch of row `row[b]` of source `part[b]`; a part past the last source gives a row of padding."""
    weighted = any(source.weighted for source in sources)
    batch = padding_rows(len(part), seq_len, weighted=weighted, document=0 if cross_document else 1)
    for number, source in enumerate(sources):
        at = np.flatnonzero(part == number)
        if len(at):
            source.fill(batch, at, row[at])
    return batch
