"""The scores of the planner: errors, rank correlation, regret, and how honest intervals and probabilities are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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


def coverage(low: Floats, high: Floats, measured: Floats, experiments: Sequence[Hashable]) -> float:
    """Share of the measured values that lie in [low, high], in the mean over experiments: each counts once, however
    many rows it has, as the rows of one err alike."""
    inside = (low <= measured) & (measured <= high)
    return float(np.mean([np.mean(inside[members]) for members in grouped(experiments, 1)]))


def brier(probability: Floats, outcome: Bools) -> float:
    """Mean of (probability - outcome)^2 (Brier, 1950): 0 for certain and right, 0.25 for always a half."""
    return float(np.mean((probability - outcome) ** 2))


def reliability(probability: Floats, outcome: Bools, bins: int = 10) -> list[dict[str, float | int]]:
    """Rows with probabilities in each of `bins` equal parts of [0, 1] that has any: `low` and `high` of the part, how
    many `rows`, the mean `probability`, and the `share` of them that came true."""
    part = np.minimum((probability * bins).astype(np.int64), bins - 1)
    return [
        {
            "low": index / bins,
            "high": (index + 1) / bins,
            "rows": int(np.sum(part == index)),
            "probability": float(np.mean(probability[part == index])),
            "share": float(np.mean(outcome[part == index])),
        }
        for index in range(bins)
        if np.any(part == index)
    ]


def constant_of_others(
    flops: Floats, measured: Floats, peaks: Floats, devices: Sequence[Hashable], experiments: Sequence[Hashable]
) -> Floats:
    """Seconds that one constant predicts which was taken from other experiments: the median FLOP/s, over all others'
    medians, of the same device and precision (`devices`); where no other has it, `peaks` (FLOP/s of the device) times
    the others' median share of the peak. NaN where there is no other experiment."""
    shares = flops / measured / peaks
    medians = [
        (experiments[members[0]], devices[members[0]], float(np.median(shares[members])))
        for members in grouped(list(zip(experiments, devices, strict=True)), 1)
    ]
    predicted = np.full_like(measured, np.nan)
    for members in grouped(list(zip(experiments, devices, strict=True)), 1):
        experiment, device = experiments[members[0]], devices[members[0]]
        others = [(which, share) for name, which, share in medians if name != experiment]
        share = [share for which, share in others if which == device] or [share for _, share in others]
        if share:
            predicted[members] = flops[members] / (np.median(share) * peaks[members])
    return predicted
