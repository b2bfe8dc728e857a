"""Exact duplicates among rows, by a digest of 128 bits of each, in memory of 28 bytes a row."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np


class DigestTable:
    """The digests of rows in order, with the places of the rows."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._digests = array("Q"), array("Q")
        self._places = array("I"), array("Q")

    def __len__(self) -> int:
        return len(self._digests[0])

    def add(self, file: str, line: int, digest: str) -> None:
        """Add the next row, with a digest of 32 hexadecimal digits."""
        for column, half in zip(self._digests, (digest[:16], digest[16:]), strict=True):
            column.append(int(half, 16))
        if file not in self._files:
            self._files[file] = len(self._names)
            self._names.append(file)
        self._places[0].append(self._files[file])
        self._places[1].append(line)

    def place(self, number: int) -> tuple[str, int]:
        """Return file and line of row `number`."""
        return self._names[self._places[0][number]], self._places[1][number]

    def digest(self, number: int) -> str:
        """Return the digest of row `number`."""
        return "".join(f"{column[number]:016x}" for column in self._digests)

    def duplicates(self) -> Iterator[tuple[int, int]]:
        """Yield (row, first row with the same digest) for each row whose digest an earlier row has, in order."""
        if not len(self):
            return
        high, low = (np.frombuffer(column, np.uint64) for column in self._digests)
        # lexsort is stable: rows with the same digest stay in their order.
        order = np.lexsort((low, high))
        begins = np.ones(len(order), bool)
        begins[1:] = (high[order[1:]] != high[order[:-1]]) | (low[order[1:]] != low[order[:-1]])
        firsts = order[begins.nonzero()[0]][np.cumsum(begins) - 1]
        copies, originals = order[~begins], firsts[~begins]
        by_row = np.argsort(copies)
        yield from zip(copies[by_row].tolist(), originals[by_row].tolist(), strict=True)
