"""The scores of the planner: errors, rank correlation, regret."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def mean_abs_error(predicted: Floats, measured: Floats) -> float:
    """Mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(predicted / measured - 1)))


def signed_error(predicted: Floats, measured: Floats) -> float:
    """Mean of predicted / measured - 1: below zero where predictions are too small."""
    return float(np.mean(predicted / measured - 1))


def ranks(values: Floats) -> Floats:
    """The rank of every value, from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    positions: Floats = (last - (counts + 1) / 2)[inverse]
    return positions


def grouped(keys: Sequence[Hashable], least: int) -> list[NDArray[np.int64]]:
    """Positions of the members of every group of at least `least` equal keys."""
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return [np.array(members) for members in positions.values() if len(members) >= least]


def spearman(predicted: Floats, measured: Floats, keys: Sequence[Hashable]) -> tuple[float | None, int]:
    """Spearman's rank correlation inside groups, pooled, and the number of rows behind it.

    Ranks are taken inside each group (of three rows or more, not all measured equal), put on a scale from -1 to 1 and
    correlated over all groups at once, so that large groups count by their rows. None where there is no such group.
    """
    ours: list[Floats] = []
    theirs: list[Floats] = []
    for members in grouped(keys, 3):
        if np.ptp(measured[members]) > 0:
            scale = 2 / (len(members) - 1)
            ours.append(ranks(predicted[members]) * scale - 1)
            theirs.append(ranks(measured[members]) * scale - 1)
    if not ours:
        return None, 0
    x, y = np.concatenate(ours), np.concatenate(theirs)
    spread = float(np.sqrt(np.sum(x * x) * np.sum(y * y)))
    return (float(np.sum(x * y)) / spread if spread else 0.0), len(x)


def top1_regrets(predicted: Floats, measured: Floats, keys: Sequence[Hashable]) -> Floats:
    """How much slower than the best the row is that is predicted to be fastest, of every group of two or more rows.
    Rows predicted equally fast share the choice."""
    regrets = []
    for members in grouped(keys, 2):
        chosen = predicted[members] <= predicted[members].min() * (1 + 1e-9)
        regrets.append(float(np.mean(measured[members][chosen]) / measured[members].min() - 1))
    return np.array(regrets, np.float64)


def one_constant(flops: Floats, measured: Floats, keys: Sequence[Hashable]) -> Floats:
    """Seconds that the simplest model predicts: all rows of equal key reach the same FLOP/s, their median."""
    predicted = np.empty_like(measured)
    for members in grouped(keys, 1):
        predicted[members] = flops[members] / np.median(flops[members] / measured[members])
    return predicted
