"""Pack requests for log-probs into rows of tokens, and read their scores from those of the rows.

A request is a document of its own in its row: it does not see the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kumi.data.binfile import Array
from kumi.data.packing.best_fit import pack
from kumi.data.row_source import padding_rows
from kumi.errors import ConfigError

# Tokens of a row, unless a request is longer: rows that are much longer than the requests in them gain nothing more.
ROW_TOKENS = 1024


class Request(NamedTuple):
    """Tokens to score after a context. Both have at least one token."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Score(NamedTuple):
    """The score of a request.

    log_prob: of the continuation, the sum over its tokens, in nats.
    greedy: whether each of its tokens is the most probable one.
    """

    log_prob: float
    greedy: bool


class Span(NamedTuple):
    """The labels of request `request`: the positions [start, stop) of row `row`."""

    request: int
    row: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows of tokens (B, S), with the columns that a decoder reads, and the spans of their requests."""

    columns: Mapping[str, Array]
    spans: Sequence[Span]

    def scores(self, log_probs: Array, top: Array) -> Iterator[tuple[int, Score]]:
        """Yield (request, its score), given log-probs and flags of the most probable tokens (B, S)."""
        for request, row, start, stop in self.spans:
            sums = float(log_probs[row, start:stop].sum(dtype=np.float64))
            yield request, Score(sums, bool(top[row, start:stop].all()))


def shorten(request: Request, max_length: int) -> Request:
    """Return `request` with the last tokens of its context, so that the decoder reads at most `max_length` tokens.

    Raise ConfigError if the continuation alone is longer.
    """
    excess = len(request.context) + len(request.continuation) - (max_length + 1)
    if excess <= 0:
        return request
    if excess >= len(request.context):
        raise ConfigError(
            f"a text of {len(request.continuation)} tokens is to be scored as a whole, but the model reads at most "
            f"{max_length} tokens; shorten it, or score it as a document by its perplexity"
        )
    return Request(request.context[excess:], request.continuation)


def pack_requests(
    requests: Sequence[Request], *, tokens: int, ranks: int = 1, multiple: int = 1
) -> Iterator[PackedBatch]:
    """Yield batches that score every one of `requests` once, those with the longest rows first.

    tokens: positions of a batch for each of `ranks` data-parallel ranks, at least one row. The rows of rank r are the
    r-th of equal parts; missing rows are padding.
    multiple: the row length S is a multiple of it.
    """
    lengths = np.array([len(context) + len(continuation) - 1 for context, continuation in requests], np.int64)
    if not len(lengths):
        return
    # Few tokens are divided among the ranks.
    capacity = max(int(lengths.max()), min(ROW_TOKENS, tokens, -(-int(lengths.sum()) // ranks)))
    bins = pack(lengths, capacity, 0)
    rows = [bins.units[bins.bounds[row] : bins.bounds[row + 1]] for row in range(bins.rows)]
    sizes = [int(lengths[units].sum()) for units in rows]
    order = sorted(range(len(rows)), key=lambda row: -sizes[row])
    count = ranks * max(1, tokens // _rounded(capacity, multiple))
    for start in range(0, len(rows), count):
        part = order[start : start + count]
        length = _rounded(sizes[part[0]], multiple)
        padded = -(-len(part) // ranks) * ranks
        yield _filled(requests, [rows[row] for row in part], padded, length)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _filled(requests: Sequence[Request], rows: Sequence[Array], count: int, length: int) -> PackedBatch:
    """Return a batch of `count` rows of `length` positions with the requests `rows`, and padding after them."""
    columns = padding_rows(count, length)
    spans = []
    for row, units in enumerate(rows):
        start = 0
        for document, unit in enumerate(units.tolist()):
            context, continuation = requests[unit]
            stop = start + len(context) + len(continuation) - 1
            first = stop - len(continuation)
            columns["input_ids"][row, start:stop] = (*context, *continuation[:-1])
            columns["labels"][row, first:stop] = continuation
            columns["position_ids"][row, start:stop] = range(stop - start)
            columns["document_ids"][row, start:stop] = document
            spans.append(Span(unit, row, first, stop))
            start = stop
        columns["position_ids"][row, start:] = range(length - start)
        columns["document_ids"][row, start:] = len(units)
    return PackedBatch(columns, spans)
