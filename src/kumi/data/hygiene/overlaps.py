"""Overlap of rows with other files, such as benchmarks: shared n-grams of 13 words, as for GPT-3 (Brown et al. 2020).

Memory: 16 bytes for each n-gram of the other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data.binfile import Array
from kumi.data.hygiene.hashed_words import gram_hashes, words_of
from kumi.data.hygiene.row_texts import file_rows
from kumi.data.record_files import Fault

GRAM = 13
# Rows of other files with fewer words are not compared: chance would match them. Rows of 8 to 12 words must match in
# full.
SHORTEST = 8


@dataclass
class ComparedFile:
    """A file that rows of the data are compared with.

    rows, too_short, faults: its rows, those too short to compare, and those that cannot be read.
    hits: rows of the data that share an n-gram with it.
    matched: lines of its rows that share an n-gram with the data.
    """

    file: str
    rows: int = 0
    too_short: int = 0
    faults: int = 0
    hits: int = 0
    matched: set[int] = field(default_factory=set)

    def summary(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "file": self.file,
            "rows": self.rows,
            "too_short": self.too_short,
            "faults": self.faults,
            "hits": self.hits,
            "matched": len(self.matched),
        }


@dataclass(frozen=True)
class Overlap:
    """The first n-gram of a row that it shares with a line of a file, as `words`."""

    file: str
    line: int
    words: str


class OverlapIndex:
    """The n-grams of `paths`. Raise ConfigError for a path that is no file of records or text."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [ComparedFile(str(path)) for path in paths]
        # By the number of words of an n-gram: hashes in order, and the place of each, file number << 40 | line.
        self._grams: dict[int, tuple[Array, Array]] = {}
        blocks: dict[int, list[tuple[Array, Array]]] = {}
        for number, path in enumerate(paths):
            counts = self.files[number]
            for row in file_rows(path):
                counts.rows += 1
                if isinstance(row, Fault):
                    counts.faults += 1
                    continue
                words = words_of(row.text)
                if len(words) < SHORTEST:
                    counts.too_short += 1
                    continue
                hashes = np.unique(gram_hashes(words, GRAM))
                place = np.full(len(hashes), number << 40 | row.line, np.uint64)
                blocks.setdefault(min(len(words), GRAM), []).append((hashes, place))
        for size, parts in blocks.items():
            hashes, places = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.argsort(hashes, kind="stable")
            self._grams[size] = hashes[order], places[order]

    def add(self, text: str) -> Overlap | None:
        """Count a row's overlaps with all files; return its first overlap with the first file that it overlaps."""
        words = words_of(text)
        # Number of a file -> line, first word and number of words of the n-gram that was shared first.
        shared: dict[int, tuple[int, int, int]] = {}
        for size, (hashes, places) in self._grams.items():
            if len(words) < size:
                continue
            grams = gram_hashes(words, size)
            left = np.searchsorted(hashes, grams)
            for at in (hashes[np.minimum(left, len(hashes) - 1)] == grams).nonzero()[0].tolist():
                right = np.searchsorted(hashes, grams[at], "right")
                for place in places[left[at] : right].tolist():
                    file, line = place >> 40, place & (1 << 40) - 1
                    self.files[file].matched.add(line)
                    shared.setdefault(file, (line, at, size))
        for file in shared:
            self.files[file].hits += 1
        if not shared:
            return None
        file = min(shared)
        line, at, size = shared[file]
        return Overlap(self.files[file].file, line, " ".join(words[at : at + size]))
