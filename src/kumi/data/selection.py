"""Choose at most a number of documents or units of a source by a hash of their content, in memory of 8 bytes each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from kumi.data.binfile import Array


class Selection:
    """The `count` smallest of `digests`, which are (n,) uint64 in blocks; of equal digests the first.

    The choice does not depend on the order of the blocks, but for equal digests.
    """

    def __init__(self, digests: Iterable[Array], count: int) -> None:
        blocks = list(digests)
        values: Array = np.concatenate(blocks) if blocks else np.zeros(0, np.uint64)
        blocks.clear()
        self._all = len(values) <= count
        if not self._all:
            values.partition(count - 1)
            self._last = values[count - 1]
            self._equal = int((values[:count] == self._last).sum())

    def admits(self, digests: Array) -> Array:
        """Return whether each of `digests` is chosen, (n,) bool.

        The calls must pass the digests of the constructor once more, in the same order.
        """
        if self._all:
            return np.ones(len(digests), bool)
        equal = digests == self._last
        first = equal & (np.cumsum(equal) <= self._equal)
        self._equal -= int(first.sum())
        chosen: Array = (digests < self._last) | first
        return chosen


def document_digests(ids: Array, lengths: Array) -> Array:
    """Return a digest of each document: (documents,) uint64 for the concatenated `ids` and their `lengths`."""
    raw, size = np.ascontiguousarray(ids).tobytes(), ids.itemsize
    ends = np.cumsum(lengths, dtype=np.int64) * size
    starts = ends - np.asarray(lengths, np.int64) * size
    hashes = (
        hashlib.blake2b(raw[start:end], digest_size=8, person=b"kumi-row").digest()
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    )
    return np.frombuffer(b"".join(hashes), "<u8")
