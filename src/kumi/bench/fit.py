"""Latency and bandwidth from timed collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kumi.bench.found import Transfer
from kumi.plan.columns import Floats
from kumi.plan.comm import collective_seconds
from kumi.plan.fit import least_squares
from kumi.spec.cluster import ClusterSpec, Device, Link

# Latencies from 10 ns to 1 s a hop, bandwidths from 1 MB/s to 100 TB/s.
_LATENCY, _BANDWIDTH = (1e-8, 1.0), (1e6, 1e14)


@dataclass(frozen=True)
class Line:
    """seconds = `latency` + size / `bandwidth`; `error` is the mean of |fitted / measured - 1|."""

    latency: float
    bandwidth: float
    error: float


def line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line through (`sizes`, `seconds`) with the least squared relative error; neither figure is negative."""
    x, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    columns = np.stack([1 / t, x / t], axis=1)
    latency, slope = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if latency < 0 or slope <= 0:
        # On the bound the other figure alone explains what it can.
        only = columns[:, 1] if latency < 0 else columns[:, 0]
        alone = float(only.sum() / (only @ only))
        latency, slope = (0.0, alone) if latency < 0 else (alone, 0.0)
    error = float(np.mean(np.abs(columns @ np.array([latency, slope]) - 1)))
    return Line(float(latency), 1 / float(slope) if slope > 0 else np.inf, error)


def fit_link(name: str, span: int, kind: str, transfers: Sequence[Transfer]) -> tuple[Link, float]:
    """The link over `span` ranks, on devices of `kind`, with which the planner's formulas come closest to `transfers`,
    and the mean relative error that is left."""

    def residuals(parameters: Floats) -> Floats:
        link = Link(name, span, bandwidth=float(parameters[1]), latency=float(parameters[0]), efficiency=1.0)
        found: Floats = np.log(_predicted(link, kind, transfers) / seconds)
        return found

    seconds = np.array([one.seconds for one in transfers])
    largest = max(transfers, key=lambda one: one.size / one.seconds)
    start = (float(seconds.min()), largest.size / largest.seconds)
    latency, bandwidth = least_squares(residuals, start, *zip(_LATENCY, _BANDWIDTH, strict=True))
    error = float(np.mean(np.abs(np.exp(residuals(np.array([latency, bandwidth]))) - 1)))
    return Link(name, span, float(bandwidth), float(latency), 1.0), error


def _predicted(link: Link, kind: str, transfers: Sequence[Transfer]) -> Floats:
    """What the planner says that each of `transfers` takes over `link`, neighbours one rank apart."""
    cluster = ClusterSpec("", Device("", kind, 0), link.span, links=(link,))
    found = [
        collective_seconds(cluster, one.kind, np.array([float(one.size)]), np.array([float(one.degree)]), np.ones(1))
        for one in transfers
    ]
    return np.concatenate(found)
