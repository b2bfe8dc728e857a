"""Token files to training sequences: sequence n is a pure function of (data, seed, n), found in constant time.

    n -> part, by weights that hold exactly in every block of 256 -> the k-th draw from that part
      -> epoch k // windows, window permutation(k % windows) -> tokens [w*S, w*S + S], labels one further

A part is cut into ceil((tokens - 1) / S) windows that share no prediction and together hold every one; the last is
filled up with padding whose labels are -100, so no token is dropped. A part that is exhausted begins its next epoch
in a new order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kumi.data.binfile import IndexedFile
from kumi.data.permute import key, permute
from kumi.errors import ConfigError
from kumi.objectives import IGNORED

Array = npt.NDArray[Any]
_BLOCK = 256
_ONE = 1 << 32


# Columns of sequences of tokens, by their names: "input_ids", "labels", "position_ids" and "document_ids", each (B, S),
# and what else an objective reads, (B, ...). labels[b, s] is the token after input_ids[b, s], or `IGNORED` where none
# is predicted: at the last token of a document and in padding. Document ids count from 0 in each row; padding is a
# document of its own.
Batch = Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Mixture:
    """An endless weighted mixture of token files. Weights are shares of sequences. With `cross_document` a sequence
    is one stream as in Megatron: attention and predictions run over document ends."""

    parts: Sequence[tuple[IndexedFile, float]]
    seq_len: int
    seed: int = 0
    cross_document: bool = False

    def __post_init__(self) -> None:
        _check([file for file, _ in self.parts], self.seq_len)
        if any(not weight > 0 for _, weight in self.parts):
            raise ConfigError(f"mixture weights {[weight for _, weight in self.parts]} must all be above 0")

    def batch(self, start: int, count: int) -> Batch:
        """Sequences start ... start + count - 1."""
        part, _, window = self.locate(start, count)
        return _cut([file for file, _ in self.parts], part, window, self.seq_len, self.cross_document)

    def locate(self, start: int, count: int) -> tuple[Array, Array, Array]:
        """Part, epoch and window of sequences start ... start + count - 1."""
        part, draw = self._draws(start, count)
        epoch, window = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for number, (file, _) in enumerate(self.parts):
            mine = part == number
            size = windows(file, self.seq_len)
            epoch[mine] = draw[mine] // size
            keys = key(self.seed, 1, number, epoch[mine])
            window[mine] = permute(draw[mine] % size, size, keys)
        return part, epoch, window

    def _draws(self, start: int, count: int) -> tuple[Array, Array]:
        """For each sequence its part, and how many sequences that part gave before it.

        Of the arrivals at a part with share p, the m-th is taken if floor(m * p) steps up there; the others go on to
        the next part. So after any whole block each part has given its exact share to within one or two sequences,
        without a state. Inside a block the arrivals come in a shuffled order, lest parts fall into step with ranks.
        """
        first = start - start % _BLOCK
        numbers = np.arange(first, -(-(start + count) // _BLOCK) * _BLOCK, dtype=np.uint64)
        block, place = numbers // np.uint64(_BLOCK), numbers % np.uint64(_BLOCK)
        arrivals = block * np.uint64(_BLOCK) + permute(place, _BLOCK, key(self.seed, 0, block))
        part, draw = np.full(len(numbers), -1, np.int64), np.zeros(len(numbers), np.int64)
        for number, (share, drawn) in enumerate(zip(self._shares(), self._drawn_before(first), strict=True)):
            before = _scaled(arrivals, share)
            takes = (part < 0) & (_scaled(arrivals + np.uint64(1), share) > before)
            part[takes] = number
            draw[takes] = drawn + np.arange(np.count_nonzero(takes))
            arrivals = arrivals - before
        wanted = slice(start - first, start - first + count)
        return part[wanted], draw[wanted]

    def _drawn_before(self, number: int) -> list[int]:
        """How many of the first `number` sequences, a whole number of blocks, each part gave."""
        result, rest = [], np.array([number], np.uint64)
        for share in self._shares():
            taken = _scaled(rest, share)
            rest = rest - taken
            result.append(int(taken[0]))
        return result

    def _shares(self) -> list[int]:
        """Of what reaches each part, the share it takes, in units of 2^-32; the last takes all."""
        weights = [weight for _, weight in self.parts]
        rest = [sum(weights[number:]) for number in range(len(weights))]
        shares = [min(max(round(w / r * _ONE), 1), _ONE - 1) for w, r in zip(weights, rest, strict=True)]
        return [*shares[:-1], _ONE]


@dataclass(frozen=True, eq=False)
class Sweep:
    """Windows of the files in order, each once: the validation set as len() sequences. Where `limit` is less than
    there are windows, that many, spread evenly over all files."""

    parts: Sequence[IndexedFile]
    seq_len: int
    cross_document: bool = False
    limit: int = 0

    def __post_init__(self) -> None:
        _check(self.parts, self.seq_len)

    def __len__(self) -> int:
        every = self._windows()
        return min(self.limit, every) if self.limit else every

    def _windows(self) -> int:
        return sum(windows(file, self.seq_len) for file in self.parts)

    def batch(self, start: int, count: int) -> Batch:
        """Sequences start ... start + count - 1; behind the last one rows are all padding, so the shape never
        changes."""
        ends = np.cumsum([windows(file, self.seq_len) for file in self.parts])
        numbers = np.arange(start, start + count)
        if len(self) < ends[-1]:
            numbers = np.where(numbers < len(self), numbers * ends[-1] // len(self), ends[-1])
        part = np.searchsorted(ends, numbers, side="right")
        window = numbers - np.concatenate([[0], ends])[part]
        return _cut(self.parts, part, window, self.seq_len, self.cross_document)


def windows(file: IndexedFile, seq_len: int) -> int:
    """Number of windows a file is cut into; the last token has no successor and needs no place as an input."""
    return -(-(file.token_count - 1) // seq_len)


def _check(files: Sequence[IndexedFile], seq_len: int) -> None:
    if not files:
        raise ConfigError("a mixture needs at least one token file")
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} must be at least 1")
    for file in files:
        if file.token_count < 2:
            raise ConfigError(
                f"{file.prefix}.bin: {file.token_count} tokens hold nothing to predict; at least 2 are needed"
            )


def _scaled(values: Array, share: int) -> Array:
    """floor(values * share / 2^32), exact for values up to 2^63."""
    low = (
        (values & np.uint64(_ONE - 1)) * np.uint64(share)
        if share < _ONE
        else (values & np.uint64(_ONE - 1)) << np.uint64(32)
    )
    return (values >> np.uint64(32)) * np.uint64(share) + (low >> np.uint64(32))


def _cut(files: Sequence[IndexedFile], part: Array, window: Array, seq_len: int, cross_document: bool) -> Batch:
    """The given windows as a batch; a part number behind the last gives a row of padding."""
    rows = len(part)
    tokens = np.zeros((rows, seq_len + 1), np.int64)
    valid = np.zeros(rows, np.int64)
    begins = np.zeros((rows, seq_len + 1), bool)
    for number, file in enumerate(files):
        mine = np.flatnonzero(part == number)
        if len(mine):
            starts = window[mine] * seq_len
            valid[mine] = np.minimum(file.token_count - starts, seq_len + 1)
            for row, start, length in zip(mine, starts, valid[mine], strict=True):
                tokens[row, :length] = file.read(start, start + length)
            if not cross_document:
                _mark_documents(file, mine, starts, valid[mine], begins)
    labels = tokens[:, 1:].copy()
    places = np.arange(seq_len + 1)
    padding = places >= valid[:, None]
    if not cross_document:
        # The last real token of a short window is never an input with a label, so padding begins right behind it.
        begins |= places == valid[:, None]
    labels[padding[:, 1:] | begins[:, 1:]] = IGNORED
    begun = np.where(begins, places, 0)[:, :seq_len]
    return {
        "input_ids": tokens[:, :seq_len].copy(),
        "labels": labels,
        "position_ids": places[:seq_len] - np.maximum.accumulate(begun, axis=1),
        "document_ids": np.cumsum(begins[:, :seq_len], axis=1, dtype=np.int32),
    }


def _mark_documents(file: IndexedFile, rows: Array, starts: Array, valid: Array, begins: Array) -> None:
    """Sets `begins` where a document begins inside a window, the window's first token excepted."""
    ends = starts + valid - 1
    found = file.document_at(np.concatenate([starts, ends]))
    first, last = found[: len(rows)] + 1, found[len(rows) :] + 1
    counts = last - first
    row = np.repeat(np.arange(len(rows)), counts)
    documents = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]
    begins[rows[row], file.starts(documents) - starts[row]] = True
