"""Decide which part of a mixture each of its sequences comes from: in exact shares, in constant time, without state.

Sequences come in blocks of 256, in shuffled order, so that parts do not alternate in step with the ranks. The parts
form a chain: a part with the fraction p takes the m-th sequence that reaches it if floor(m * p) increases at m, and
passes the other sequences to the next part. After each complete block, the sequences of every part are therefore exact
to within one or two.

With weights, fractions are multiples of 2^-32, and blocks go on without end. With counts, fractions are ratios of whole
numbers, and a round of sum(counts) sequences ends with a short block: each part then has exactly its count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.data.binfile import Array
from kumi.data.feistel import key, permute
from kumi.errors import ConfigError

_BLOCK = 256
_ONE = 1 << 32  # the denominator of fractions by weights


@dataclass(frozen=True)
class Interleaving:
    """The part of each sequence of an endless mixture.

    fractions: (numerator, denominator) of the share that each part takes of the sequences that reach it; 1 for the
        last one.
    round: the number of sequences after which the parts have their exact counts; 0 with weights, without such a number.
    """

    fractions: tuple[tuple[int, int], ...]
    seed: int
    round: int = 0

    def draws(self, start: int, count: int) -> tuple[Array, Array]:
        """Return the part of each sequence in [start, start + count), and the number of earlier sequences from that
        part, each (count,)."""
        first, stop = self._block_begin(start), self._block_end(start + count)
        numbers = np.arange(first, stop)
        arrivals = self._shuffled(numbers)
        part, draw = np.full(len(numbers), -1, np.int64), np.zeros(len(numbers), np.int64)
        for number, (fraction, drawn) in enumerate(zip(self.fractions, self._drawn_before(first), strict=True)):
            before = _scale(arrivals, *fraction)
            taken = (part < 0) & (_scale(arrivals + np.uint64(1), *fraction) > before)
            part[taken] = number
            draw[taken] = drawn + np.arange(np.count_nonzero(taken))
            arrivals = arrivals - before
        requested = slice(start - first, start - first + count)
        return part[requested], draw[requested]

    def drawn(self, sequences: int) -> list[int]:
        """Return how many of the first `sequences` sequences come from each part."""
        first = self._block_begin(sequences)
        part, _ = self.draws(first, sequences - first)
        inside = np.bincount(part, minlength=len(self.fractions))
        return [before + int(more) for before, more in zip(self._drawn_before(first), inside, strict=True)]

    def _shuffled(self, numbers: Array) -> Array:
        """Return the place at which each sequence of `numbers`, which are whole blocks, reaches the first part."""
        in_round = numbers % self.round if self.round else numbers
        offset = in_round % _BLOCK
        begin = numbers - offset
        # A short block ends a round; the blocks of all rounds count on, so that each has another order.
        size = np.minimum(self.round - (in_round - offset), _BLOCK) if self.round else np.full(len(numbers), _BLOCK)
        blocks_per_round = -(-self.round // _BLOCK)
        rounds = numbers // self.round if self.round else np.zeros(len(numbers), np.int64)
        keys = key(self.seed, 0, rounds * blocks_per_round + in_round // _BLOCK)
        place = np.zeros(len(numbers), np.uint64)
        for length in np.unique(size):
            same = size == length
            place[same] = permute(offset[same], int(length), keys[same])
        arrivals: Array = begin.astype(np.uint64) + place
        return arrivals

    def _block_begin(self, number: int) -> int:
        """Return the first sequence of the block that has the sequence `number`."""
        in_round = number % self.round if self.round else number
        return number - in_round % _BLOCK

    def _block_end(self, number: int) -> int:
        """Return the sequence after the block that has the sequence `number - 1`."""
        begin = self._block_begin(number)
        if begin == number:
            return number
        return min(begin + _BLOCK, number - number % self.round + self.round) if self.round else begin + _BLOCK

    def _drawn_before(self, number: int) -> list[int]:
        """Return the number of sequences of each part among the first `number`, which are whole blocks."""
        result, remaining = [], np.array([number], np.uint64)
        for fraction in self.fractions:
            taken = _scale(remaining, *fraction)
            remaining = remaining - taken
            result.append(int(taken[0]))
        return result


def by_weights(weights: Sequence[float], seed: int) -> Interleaving:
    """Return the interleaving of parts in the shares `weights`, relative to each other.

    For part i the fraction is weight[i] / sum(weight[i:]). Raise ConfigError unless all weights are above 0.
    """
    if any(not weight > 0 for weight in weights):
        raise ConfigError(f"mixture weights {list(weights)} must all be greater than 0")
    remaining = [sum(weights[number:]) for number in range(len(weights))]
    fractions = [min(max(round(w / r * _ONE), 1), _ONE - 1) for w, r in zip(weights, remaining, strict=True)]
    return Interleaving((*((fraction, _ONE) for fraction in fractions[:-1]), (_ONE, _ONE)), seed)


def by_counts(counts: Sequence[int], seed: int) -> Interleaving:
    """Return the interleaving whose rounds of sum(counts) sequences have counts[i] sequences of part i.

    Raise ConfigError unless all counts are above 0.
    """
    if any(count < 1 for count in counts):
        raise ConfigError(f"mixture counts {list(counts)} must all be at least 1")
    remaining = [sum(counts[number:]) for number in range(len(counts))]
    return Interleaving(tuple(zip(counts, remaining, strict=True)), seed, sum(counts))


def _scale(values: Array, numerator: int, denominator: int) -> Array:
    """Return floor(values * numerator / denominator), exact if the result is below 2^64; numerator <= denominator."""
    if denominator > _ONE:  # products of remainders may exceed 64 bits
        exact: Array = values.astype(object) * numerator // denominator
        return exact.astype(np.uint64)
    up, down = np.uint64(numerator), np.uint64(denominator)
    result: Array = values // down * up + values % down * up // down
    return result
