"""Fit latency and bandwidth to timed collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.bench.measurements import Transfer
from kumi.plan.calibration.fit_constants import least_squares
from kumi.plan.layout_batch import Floats
from kumi.plan.time.collective_times import collective_seconds
from kumi.spec.cluster import ClusterSpec, Device, Link

# Bounds: latencies from 10 ns to 1 s per hop, bandwidths from 1 MB/s to 100 TB/s.
_LATENCY, _BANDWIDTH = (1e-8, 1.0), (1e6, 1e14)


@dataclass(frozen=True)
class FittedLine:
    """seconds = `latency` + size / `bandwidth`; `error` is the mean of |fitted / measured - 1|."""

    latency: float
    bandwidth: float
    error: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> FittedLine:
    """Fit a line to (`sizes`, `seconds`) with the smallest squared relative error; neither coefficient is negative."""
    x, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    columns = np.stack([1 / t, x / t], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if latency < 0 or slope <= 0:
        # Set the coefficient at its bound to zero and refit the other one alone.
        column = columns[:, 1] if latency < 0 else columns[:, 0]
        coefficient = float(column.sum() / (column @ column))
        latency, slope = (0.0, coefficient) if latency < 0 else (coefficient, 0.0)
    error = float(np.mean(np.abs(columns @ np.array([latency, slope]) - 1)))
    return FittedLine(float(latency), 1 / float(slope) if slope > 0 else np.inf, error)


def fit_link(name: str, span: int, kind: str, transfers: Sequence[Transfer]) -> tuple[Link, float]:
    """Fit a link over `span` ranks, on devices of `kind`, so that the planner's formulas reproduce `transfers`.

    Return the link and the mean relative error that remains.
    """

    def residuals(parameters: Floats) -> Floats:
        link = Link(name, span, bandwidth=float(parameters[1]), latency=float(parameters[0]), efficiency=1.0)
        logarithms: Floats = np.log(_predicted(link, kind, transfers) / seconds)
        return logarithms

    seconds = np.array([transfer.seconds for transfer in transfers])
    fastest = max(transfers, key=lambda transfer: transfer.size / transfer.seconds)
    start = (float(seconds.min()), fastest.size / fastest.seconds)
    latency, bandwidth = least_squares(residuals, start, *zip(_LATENCY, _BANDWIDTH, strict=True))
    error = float(np.mean(np.abs(np.exp(residuals(np.array([latency, bandwidth]))) - 1)))
    return Link(name, span, float(bandwidth), float(latency), 1.0), error


def _predicted(link: Link, kind: str, transfers: Sequence[Transfer]) -> Floats:
    """Return the planner's seconds of each transfer over `link`, for groups of consecutive ranks."""
    cluster = ClusterSpec("", Device("", kind, 0), link.span, links=(link,))
    seconds = [
        collective_seconds(cluster, item.kind, np.array([float(item.size)]), np.array([float(item.degree)]), np.ones(1))
        for item in transfers
    ]
    return np.concatenate(seconds)
