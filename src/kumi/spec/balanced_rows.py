"""Pack sequences into few rows of a batch, which are about equally full and balanced over the data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowPlan:
    """The sequences of each row.

    rows: the indices of the sequences in each row; rank r has the rows r, r + ranks, r + 2 ranks ...
    length: positions of every row.
    """

    rows: Sequence[Sequence[int]]
    length: int


def plan_rows(positions: Sequence[int], longest: int, ranks: int, multiple: int = 1) -> RowPlan:
    """Return rows for sequences that take `positions`: about equally full, with at most `longest` positions each.

    The number of rows is the smallest multiple of `ranks` for which the longest sequence that is left can always go to
    the emptiest row (Graham, "Bounds on multiprocessing timing anomalies", 1969). The length of a row is a multiple of
    `multiple`, as `longest` must be. No sequence may be longer than `longest`.
    """
    order = sorted(range(len(positions)), key=lambda sequence: (-positions[sequence], sequence))
    count = ranks * max(1, -(-sum(positions) // (longest * ranks)))
    while (rows := _balanced(order, positions, count, longest)) is None:
        count += ranks
    fullest = max(sum(positions[sequence] for sequence in row) for row in rows)
    return RowPlan(rows, max(multiple, -(-fullest // multiple) * multiple))


def _balanced(order: Sequence[int], positions: Sequence[int], count: int, longest: int) -> list[list[int]] | None:
    """Return `count` rows: each sequence of `order` in turn goes to the emptiest row. None if one does not fit."""
    rows: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, row) for row in range(count)]
    for sequence in order:
        used, row = heapq.heappop(emptiest)
        if used + positions[sequence] > longest:
            return None
        rows[row].append(sequence)
        heapq.heappush(emptiest, (used + positions[sequence], row))
    return rows
