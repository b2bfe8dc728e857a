"""Pack units into rows by best-fit decreasing, in windows of shuffled units.

Best-fit decreasing takes the units of a window from the longest to the shortest, and places each into the row with the
least free space that it fits in, or into a new row. All that matters of a row is its free space, a small integer. Rows
with equal free space that were filled alike have consecutive numbers, and units of equal length are placed into them in
one operation; the result is that of placing one unit at a time. Source: Johnson et al., "Worst-case performance bounds
for simple one-dimensional packing algorithms"; for rows of tokens, Ding et al., "Fewer truncations improve language
modeling"."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from kumi.data.binfile import Array
from kumi.data.feistel import key, scramble

# Part of the name of a stored plan: raise it if `pack` changes its result for the same input.
VERSION = 1
# Units of a window: enough that few rows have space left, and few enough that a row's units are a random choice.
_WINDOW = 1 << 16


@dataclass(frozen=True, eq=False)
class Bins:
    """Units in rows: row r has the units `units[bounds[r] : bounds[r + 1]]`.

    units: numbers of units, from 0, int32, each at most once.
    bounds: int32 (rows + 1,), ascending from 0.
    too_long, empty: how many units are in no row because they are longer than a row, or have no position.
    """

    units: Array
    bounds: Array
    too_long: int
    empty: int

    @property
    def rows(self) -> int:
        return len(self.bounds) - 1


def pack(lengths: Array, seq_len: int, seed: int) -> Bins:
    """Return the units of `lengths` (units,) positions in rows of `seq_len` positions, no unit split.

    The result is a pure function of the arguments.
    """
    fits = (lengths > 0) & (lengths <= seq_len)
    shuffled = np.argsort(scramble(np.arange(len(lengths), dtype=np.uint64) ^ key(seed, 2)), kind="stable")
    shuffled = shuffled[fits[shuffled]].astype(np.int32)
    units, sizes = np.empty(len(shuffled), np.int32), []
    for start in range(0, len(shuffled), _WINDOW):
        window = shuffled[start : start + _WINDOW]
        order, counts = _pack_window(lengths[window], seq_len)
        units[start : start + _WINDOW] = window[order]
        sizes.append(counts)
    bounds = np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int32)
    return Bins(units, bounds, int((lengths > seq_len).sum()), int((lengths < 1).sum()))


def _pack_window(lengths: Array, seq_len: int) -> tuple[Array, Array]:
    """Return the order of units by row, and the number of units of each row."""
    first, rows, each = np.array(_placements(lengths, seq_len), np.int64).reshape(-1, 3).T
    placed = rows * each
    # Units from the longest to the shortest, and the row of each: a placement gives `each` units to each of its rows.
    within = np.arange(len(lengths)) - np.repeat(np.cumsum(placed) - placed, placed)
    row = np.repeat(first, placed) + within // np.repeat(each, placed)
    decreasing = np.argsort(-lengths, kind="stable")
    return decreasing[np.argsort(row, kind="stable")], np.bincount(row)


def _placements(lengths: Array, seq_len: int) -> list[tuple[int, int, int]]:
    """Return (first row, rows, units in each) of each operation, in the order of decreasing lengths."""
    values, multiplicities = np.unique(lengths, return_counts=True)
    result, begun = [], 0
    spaces: list[int] = []  # free spaces that a row has, ascending
    rows_of: dict[int, list[tuple[int, int]]] = {}  # free space -> ranges of rows that have it
    for length, count in zip(values[::-1].tolist(), multiplicities[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces[at]
                ranges = rows_of[space]
                first, stop = ranges.pop()
            else:
                space, first, stop, ranges = seq_len, begun, begun + count, []
            # After it takes a unit, the row with the least free space still has the least, so it takes all that fit.
            each = space // length
            rows = min(stop - first, count // each)
            if not rows:
                rows, each = 1, count
            left = space - each * length
            result.append((first, rows, each))
            count -= rows * each
            if at == len(spaces):
                begun += rows
            elif first + rows < stop:
                ranges.append((first + rows, stop))
            elif not ranges:
                del spaces[at], rows_of[space]
            if left in rows_of:
                rows_of[left].append((first, first + rows))
            elif left:
                at = bisect_left(spaces, left)
                spaces.insert(at, left)
                rows_of[left] = [(first, first + rows)]
    return result
