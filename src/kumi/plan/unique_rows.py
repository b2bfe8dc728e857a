"""Which rows of many are alike, so that a formula is worked out once for all of them."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Ints

# Up to this many times as many values as rows, a table is faster than sorting.
TABLE = 4


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """The first row of every combination of values in `columns`, and for every row the number of its combination.

    Values are 0 or more.
    """
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        count, place = _numbered(column)
        code = code * count + place
    count, place = _numbered(code)
    first = np.zeros(count, np.int64)
    # Of several assignments to one element the last holds: from the end, it is the first row's.
    first[place[::-1]] = np.arange(len(code) - 1, -1, -1)
    return first, place


def _numbered(column: Ints) -> tuple[int, Ints]:
    """How many values `column` has, and for every row the number of its value, in ascending order."""
    top = int(column.max(initial=0)) + 1
    if top > TABLE * len(column) + 2**16:
        values, place = np.unique(column, return_inverse=True)
        return len(values), place
    seen = np.zeros(top, np.bool_)
    seen[column] = True
    number = np.cumsum(seen) - 1
    return int(number[-1]) + 1, number[column]
