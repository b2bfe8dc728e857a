"""Sample training sequences from token files: sequence n is a pure function of (data, seed, n), in constant time.

    n -> part, by weights that are exact in every block of 256 -> draw k from that part
      -> epoch k // windows, window w = permutation(k % windows) -> inputs [w*S, w*S + S), labels one token further

A part is one token file. It has ceil((tokens - 1) / S) windows, and each token except the first is the label of exactly
one window. The last window is padded with labels of -100, so no token is dropped. Each epoch of a part has a new
order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kumi.data.binfile import Array, IndexedFile
from kumi.data.feistel import key, permute
from kumi.errors import ConfigError
from kumi.objectives import IGNORED

_BLOCK = 256
_ONE = 1 << 32
# Rows on which the mean span of documents is measured: enough for a few percent, and read in a fraction of a second.
_SPAN_WINDOWS = 1024

# A batch of token sequences: name -> array. "input_ids", "labels", "position_ids" and "document_ids" are (B, S); an
# objective may add arrays (B, ...). labels[b, s] is the token after input_ids[b, s], or `IGNORED` at the last token of
# a document and in padding. Document ids count from 0 in each row; padding is a separate document.
Batch = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Mixture:
    """An endless weighted mixture of token files.

    parts: token files with their weights; the number of sequences from a file is proportional to its weight.
    cross_document: attend and predict across document boundaries, as Megatron does.
    """

    parts: Sequence[tuple[IndexedFile, float]]
    seq_len: int
    seed: int = 0
    cross_document: bool = False

    def __post_init__(self) -> None:
        _check([file for file, _ in self.parts], self.seq_len)
        if any(not weight > 0 for _, weight in self.parts):
            raise ConfigError(f"mixture weights {[weight for _, weight in self.parts]} must all be greater than 0")

    def batch(self, start: int, count: int) -> Batch:
        """Return the sequences [start, start + count)."""
        part, _, window = self.locate(start, count)
        return _batch([file for file, _ in self.parts], part, window, self.seq_len, self.cross_document)

    def locate(self, start: int, count: int) -> tuple[Array, Array, Array]:
        """Return part, epoch and window of the sequences [start, start + count), each (count,)."""
        part, draw = self._draws(start, count)
        epoch, window = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for number, (file, _) in enumerate(self.parts):
            mask = part == number
            size = windows(file, self.seq_len)
            epoch[mask] = draw[mask] // size
            keys = key(self.seed, 1, number, epoch[mask])
            window[mask] = permute(draw[mask] % size, size, keys)
        return part, epoch, window

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
    """The validation set: all windows of the files in order, each once; len() is their number.

    limit: if greater than 0, use at most this many windows, evenly spaced over all files.
    """

    parts: Sequence[IndexedFile]
    seq_len: int
    cross_document: bool = False
    limit: int = 0

    def __post_init__(self) -> None:
        _check(self.parts, self.seq_len)

    def __len__(self) -> int:
        total = self._windows()
        return min(self.limit, total) if self.limit else total

    def _windows(self) -> int:
        return sum(windows(file, self.seq_len) for file in self.parts)

    def batch(self, start: int, count: int) -> Batch:
        """Return the sequences [start, start + count); rows past the last sequence are padding."""
        ends = np.cumsum([windows(file, self.seq_len) for file in self.parts])
        numbers = np.arange(start, start + count)
        if len(self) < ends[-1]:
            numbers = np.where(numbers < len(self), numbers * ends[-1] // len(self), ends[-1])
        part = np.searchsorted(ends, numbers, side="right")
        window = numbers - np.concatenate([[0], ends])[part]
        return _batch(self.parts, part, window, self.seq_len, self.cross_document)


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


def _check(files: Sequence[IndexedFile], seq_len: int) -> None:
    if not files:
        raise ConfigError("a mixture needs at least one token file")
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} must be at least 1")
    for file in files:
        if file.token_count < 2:
            raise ConfigError(
                f"{file.prefix}.bin: has {file.token_count} tokens, but a training sequence needs at least 2; add "
                "documents"
            )


def _scale(values: Array, fraction: int) -> Array:
    """Return floor(values * fraction / 2^32), exact for values up to 2^63."""
    low = (
        (values & np.uint64(_ONE - 1)) * np.uint64(fraction)
        if fraction < _ONE
        else (values & np.uint64(_ONE - 1)) << np.uint64(32)
    )
    return (values >> np.uint64(32)) * np.uint64(fraction) + (low >> np.uint64(32))


def _batch(files: Sequence[IndexedFile], part: Array, window: Array, seq_len: int, cross_document: bool) -> Batch:
    """Return the batch of window `window[b]` of file `part[b]`; a part past the last file gives a row of padding."""
    rows = len(part)
    tokens = np.zeros((rows, seq_len + 1), np.int64)
    valid = np.zeros(rows, np.int64)  # tokens of each row before its padding
    is_start = np.zeros((rows, seq_len + 1), bool)
    for number, file in enumerate(files):
        file_rows = np.flatnonzero(part == number)
        if len(file_rows):
            starts = window[file_rows] * seq_len
            valid[file_rows] = np.minimum(file.token_count - starts, seq_len + 1)
            for row, start, length in zip(file_rows, starts, valid[file_rows], strict=True):
                tokens[row, :length] = file.read(start, start + length)
            if not cross_document:
                _mark_documents(file, file_rows, starts, valid[file_rows], is_start)
    labels = tokens[:, 1:].copy()
    positions = np.arange(seq_len + 1)
    padding = positions >= valid[:, None]
    if not cross_document:
        # The last token of a short window is a label only, so the padding document starts right after it.
        is_start |= positions == valid[:, None]
    labels[padding[:, 1:] | is_start[:, 1:]] = IGNORED
    document_starts = np.where(is_start, positions, 0)[:, :seq_len]
    return {
        "input_ids": tokens[:, :seq_len].copy(),
        "labels": labels,
        "position_ids": positions[:seq_len] - np.maximum.accumulate(document_starts, axis=1),
        "document_ids": np.cumsum(is_start[:, :seq_len], axis=1, dtype=np.int32),
    }


def _mark_documents(file: IndexedFile, rows: Array, starts: Array, valid: Array, is_start: Array) -> None:
    """Set `is_start` (B, S + 1) at each document start inside the windows of `rows`, except at their first tokens.

    `starts` and `valid` are the first token and the number of tokens of each window.
    """
    ends = starts + valid - 1
    documents_at = file.document_at(np.concatenate([starts, ends]))
    first, last = documents_at[: len(rows)] + 1, documents_at[len(rows) :] + 1
    counts = last - first
    row = np.repeat(np.arange(len(rows)), counts)
    documents = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]
    is_start[rows[row], file.starts(documents) - starts[row]] = True
