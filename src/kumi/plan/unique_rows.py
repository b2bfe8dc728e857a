"""Find the distinct rows of a batch, so that a formula is evaluated once for all equal rows."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Ints

# A lookup table is faster than sorting while values are below this multiple of the number of rows.
_TABLE_FACTOR = 4


def unique_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """Return (first, inverse) of the distinct rows of `columns`.

    `first` holds the index of the first row with each combination of values, and `inverse`, (rows,), the index into
    `first` of each row's combination, as `np.unique` returns them. Values must not be negative.
    """
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        count, inverse = _rank_values(column)
        code = code * count + inverse
    count, inverse = _rank_values(code)
    first = np.zeros(count, np.int64)
    # The last of several assignments to an element wins. Assigning in reverse order leaves the first row's index.
    first[inverse[::-1]] = np.arange(len(code) - 1, -1, -1)
    return first, inverse


def _rank_values(column: Ints) -> tuple[int, Ints]:
    """Return the number of distinct values in `column`, and the index of each row's value in ascending order."""
    top = int(column.max(initial=0)) + 1
    if top > _TABLE_FACTOR * len(column) + 2**16:
        values, inverse = np.unique(column, return_inverse=True)
        return len(values), inverse
    seen = np.zeros(top, np.bool_)
    seen[column] = True
    rank = np.cumsum(seen) - 1
    return int(rank[-1]) + 1, rank[column]
