"""Metrics of tasks, with standard errors over documents or rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The kind of a task of lm-evaluation-harness begins with this word.
HARNESS_KIND = "lm-eval"

# Kind of a task -> the names of its metrics, and whether a higher value is better.
METRICS_OF_KIND = {
    "perplexity": {"perplexity": False, "word_perplexity": False, "byte_perplexity": False, "bits_per_byte": False},
    "multiple_choice": {"acc": True, "acc_norm": True},
    "exact_match": {"exact_match": True},
    "reasoning_gym": {"accuracy": True, "score": True},
}
HIGHER_IS_BETTER = {name: higher for metrics in METRICS_OF_KIND.values() for name, higher in metrics.items()}


@dataclass(frozen=True)
class Metric:
    """A value and its standard error; None for the error of a single document or row."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class TaskResult:
    """The result of a task: its metrics by name, over `count` documents or rows."""

    name: str
    kind: str
    count: int
    metrics: Mapping[str, Metric]


def mean(values: Sequence[float]) -> Metric:
    """Return the mean of `values` with its standard error, from their sample variance."""
    count = len(values)
    average = math.fsum(values) / count
    if count < 2:
        return Metric(average, None)
    variance = math.fsum((value - average) ** 2 for value in values) / (count - 1)
    return Metric(average, math.sqrt(variance / count))


def ratio(sums: Sequence[float], counts: Sequence[int]) -> Metric:
    """Return sum(sums) / sum(counts), of one sum and one count per document, with the standard error of this ratio.

    The error is that of the linearised ratio, which resampling of documents approximates (Cochran, Sampling Techniques,
    1977, section 6.3).
    """
    documents, total = len(sums), sum(counts)
    value = math.fsum(sums) / total
    if documents < 2:
        return Metric(value, None)
    squares = math.fsum((part - value * count) ** 2 for part, count in zip(sums, counts, strict=True))
    return Metric(value, math.sqrt(squares * documents / (documents - 1)) / total)


def exponential(metric: Metric) -> Metric | None:
    """Return exp(`metric`) with the error to first order; None if the value is too large for a float."""
    try:
        value = math.exp(metric.value)
    except OverflowError:
        return None
    return Metric(value, None if metric.stderr is None else value * metric.stderr)


def perplexities(log_probs: Sequence[float], tokens: Sequence[int], texts: Sequence[str]) -> dict[str, Metric]:
    """Return the perplexity by token, word and byte, and the bits per byte, of documents.

    log_probs, tokens, texts: of each document, its log-prob in nats, its number of tokens, and its text.

    Words are separated by white space, and bytes are those of UTF-8: both are counted in the text and do not depend on
    the tokenizer.
    """
    losses = [-log_prob for log_prob in log_probs]
    by_byte = ratio(losses, [len(text.encode()) for text in texts])
    bits = Metric(by_byte.value / math.log(2), None if by_byte.stderr is None else by_byte.stderr / math.log(2))
    metrics = {
        "perplexity": exponential(ratio(losses, tokens)),
        "word_perplexity": exponential(ratio(losses, [len(text.split()) for text in texts])),
        "byte_perplexity": exponential(by_byte),
        "bits_per_byte": bits,
    }
    return {name: metric for name, metric in metrics.items() if metric is not None}
