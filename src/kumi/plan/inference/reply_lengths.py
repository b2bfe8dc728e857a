"""Lengths of replies from a mean and a tail."""

from __future__ import annotations

from math import exp, log, sqrt
from random import Random
from statistics import NormalDist

from kumi.errors import ConfigError

# The 99th percentile of the standard normal distribution.
_P99 = NormalDist().inv_cdf(0.99)


def reply_lengths(count: int, mean: float, p99: float | None = None) -> list[int]:
    """Return `count` numbers of tokens with this mean and 99th percentile, in a fixed random order, each at least 1.

    Without `p99` all are equal. Else they are the quantiles of a log-normal distribution. Raise ConfigError if no
    log-normal distribution has this mean and percentile.
    """
    if p99 is None or p99 == mean:
        return [max(1, round(mean))] * count
    if not mean < p99 <= longest_p99(mean):
        raise ConfigError(
            f"lengths: a 99th percentile of {p99:g} with a mean of {mean:g} has no log-normal distribution; give one "
            f"between {mean:g} and {longest_p99(mean):,.0f}"
        )
    # mean = exp(mu + sigma^2 / 2) and p99 = exp(mu + sigma * _P99).
    sigma = _P99 - sqrt(max(0.0, _P99**2 - 2 * log(p99 / mean)))
    normal = NormalDist(log(mean) - sigma**2 / 2, sigma)
    lengths = [max(1, round(exp(normal.inv_cdf((index + 0.5) / count)))) for index in range(count)]
    Random(0).shuffle(lengths)
    return lengths


def longest_p99(mean: float) -> float:
    """Return the largest 99th percentile that a log-normal distribution of this mean has."""
    return mean * exp(_P99**2 / 2)
