"""Rows for sequences that are packed: few of them, about equally full, and balanced over the data-parallel ranks."""

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
    """Return rows for sequences that take `positions`, of about equal sums and at most `longest` positions each.

    The number of rows is the smallest multiple of `ranks` for which the longest sequence that is left can always go to
    the emptiest row (Graham, "Bounds on multiprocessing timing anomalies", 1969). `multiple`: a row has a multiple of
    this many positions. `longest` is one, and no sequence is longer.
    """
    order = sorted(range(len(positions)), key=lambda number: (-positions[number], number))
    count = ranks * max(1, -(-sum(positions) // (longest * ranks)))
    while (rows := _balanced(order, positions, count, longest)) is None:
        count += ranks
    fullest = max(sum(positions[number] for number in row) for row in rows)
    return RowPlan(rows, max(multiple, -(-fullest // multiple) * multiple))


def _balanced(order: Sequence[int], positions: Sequence[int], count: int, longest: int) -> list[list[int]] | None:
    """Return `count` rows, each sequence of `order` in the row that was emptiest; None if that row has no room."""
    rows: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]
    for sequence in order:
        used, number = heapq.heappop(emptiest)
        if used + positions[sequence] > longest:
            return None
        rows[number].append(sequence)
        heapq.heappush(emptiest, (used + positions[sequence], number))
    return rows
