"""Units of examples in memory, for tests of packing: `kumi.data.packing.unit_positions.Units` without files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np


@dataclass
class MemoryUnits:
    """`sequences[u]`: the sequences of unit u, each (ids, mask, weights)."""

    prefix: Path
    sequences: list
    kind: str = "chat"
    weighted: bool = False

    @property
    def columns(self):
        rows = [(len(unit), sum(len(ids) for ids, _, _ in unit)) for unit in self.sequences]
        return np.array(rows, [("documents", "<i4"), ("tokens", "<i4")])

    @property
    def file(self):
        return SimpleNamespace(lengths=np.array([len(ids) for unit in self.sequences for ids, _, _ in unit], np.int32))

    def tokens_of(self, unit):
        ids, mask, weights = (np.concatenate(column) for column in zip(*self.sequences[unit], strict=True))
        lengths = np.array([len(ids) for ids, _, _ in self.sequences[unit]], np.int32)
        return SimpleNamespace(ids=ids, mask=mask, weights=weights if self.weighted else None, lengths=lengths)


def random_units(folder, count, longest, seed=0, *, vocab=97, pairs=0.2, weighted=False, kind="chat"):
    """Return `count` random units; the share `pairs` has two sequences. A sequence has at most `longest` tokens."""
    rng = np.random.default_rng(seed)

    def sequence():
        size = int(rng.integers(1, longest + 1))
        return (
            rng.integers(0, vocab, size).astype(np.uint16),
            rng.integers(0, 2, size).astype(np.uint8) | np.uint8(3 << 1),
            rng.uniform(0.1, 2, size).astype(np.float32),
        )

    sequences = [[sequence() for _ in range(1 + (rng.random() < pairs))] for _ in range(count)]
    return MemoryUnits(folder / "units", sequences, kind, weighted)
