"""Units of examples in memory, for tests of packing: `kumi.data.packing.unit_positions.Units` without files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kumi.data.unit_files import UNIT_COLUMNS


@dataclass
class MemoryUnits:
    """`sequences[u]`: the sequences of unit u, each (ids, mask, weights)."""

    prefix: Path
    sequences: list
    kind: str = "chat"
    weighted: bool = False

    @property
    def columns(self):
        first, rows = 0, []
        for number, unit in enumerate(self.sequences):
            tokens, trained = sum(len(ids) for ids, _, _ in unit), sum(int((mask & 1).sum()) for _, mask, _ in unit)
            rows.append((first, len(unit), number % 2, number / 4, tokens, trained, number))
            first += len(unit)
        return np.array(rows, UNIT_COLUMNS)

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


def random_replies(folder, count, longest, seed=0, *, vocab=97, sides=2, kind="preference"):
    """Return `count` units of `sides` sequences each: a random prompt, and replies of at most `longest` tokens."""
    rng = np.random.default_rng(seed)

    def tokens(least):
        return rng.integers(0, vocab, int(rng.integers(least, longest + 1))).astype(np.uint16)

    def unit():
        prompt, sequences = tokens(1), []
        for _ in range(sides):
            reply = tokens(1)
            mask = np.concatenate([np.zeros(len(prompt), np.uint8), np.ones(len(reply), np.uint8)])
            sequences.append((np.concatenate([prompt, reply]), mask, np.ones(len(mask), np.float32)))
        return sequences

    return MemoryUnits(folder / "units", [unit() for _ in range(count)], kind)
