"""Figures that a search has computed before: layouts in different parts of a search agree in most fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from kumi.plan.layout_batch import Floats, Ints


class RowCache:
    """Figures of one job's layouts, stored under the values of those fields that determine them.

    Threads may share a cache. A pickled cache is empty.
    """

    def __init__(self) -> None:
        self._column: dict[tuple[int, ...], int] = {}
        self._figures: Floats = np.zeros((0, 0))
        self._filled = 0
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowCache, ()

    def figures(self, fields: Sequence[Ints], compute: Callable[[Ints], Floats]) -> Floats:
        """Return the figures of layouts with the values `fields`, (rows,) each, as an array (figures, rows).

        `compute` returns the figures of the rows with the given indices, in the same form.
        """
        keys = list(zip(*(column.tolist() for column in fields), strict=True))
        missing = [row for row, key in enumerate(keys) if key not in self._column]
        computed = compute(np.array(missing, np.int64)) if missing else None
        with self._lock:
            if computed is not None:
                self._add([keys[row] for row in missing], computed)
            return self._figures[:, [self._column[key] for key in keys]]

    def _add(self, keys: Sequence[tuple[int, ...]], computed: Floats) -> None:
        """Store the figures `computed`, (figures, rows), of the rows with the values `keys`."""
        first, end = self._filled, self._filled + len(keys)
        if end > self._figures.shape[1]:
            grown = np.empty((len(computed), max(1024, 2 * end)))
            grown[:, :first] = self._figures[:, :first] if first else 0.0
            self._figures = grown
        # Another thread may have added some of `keys`: these columns then replace equal ones.
        self._figures[:, first:end], self._filled = computed, end
        self._column |= {key: first + place for place, key in enumerate(keys)}


@dataclass(frozen=True)
class SearchCaches:
    """The caches of a worker of a search: costs of microbatches, sizes of parameters, activations per token."""

    costs: RowCache = field(default_factory=RowCache)
    params: RowCache = field(default_factory=RowCache)
    activations: RowCache = field(default_factory=RowCache)
