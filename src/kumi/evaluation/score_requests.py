"""Pack requests for log-probs into rows of tokens, and read the scores of requests from the log-probs of the rows.

A request is a document of its own in its row: it does not see the others. Requests with the same context, such as the
choices of one question, may share it: the row then has the context once, and each request as a branch after it
(`kumi.nn.attention.shared_prefix`).
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
# Contexts up to this length are not shared: a branch costs the attention of each layer a few operators more.
MIN_SHARED = 8


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
        """Yield (index of a request, its score).

        `log_probs` (B, S): of the labels. `top` (B, S): whether a label is the most probable token.
        """
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
    requests: Sequence[Request], *, tokens: int, ranks: int = 1, multiple: int = 1, share: bool = False
) -> Iterator[PackedBatch]:
    """Yield batches that score every one of `requests` once, those with the longest rows first.

    tokens: positions of a batch for each of `ranks` data-parallel ranks, at least one row. The rows of rank r are the
    r-th of equal parts; missing rows are padding.
    multiple: the row length S is a multiple of it.
    share: put requests with the same context after a single copy of it, as branches.
    """
    if not requests:
        return
    groups = _groups(requests, share)
    lengths = np.array([_length([requests[index] for index in group]) for group in groups], np.int64)
    # If there are few tokens, rows are shorter, so that all ranks get some.
    capacity = max(int(lengths.max()), min(ROW_TOKENS, tokens, -(-int(lengths.sum()) // ranks)))
    bins = pack(lengths, capacity, 0)  # a bin is a row, and its units are groups
    rows = [bins.units[bins.bounds[row] : bins.bounds[row + 1]] for row in range(bins.rows)]
    sizes = [int(lengths[units].sum()) for units in rows]
    order = sorted(range(len(rows)), key=lambda row: -sizes[row])
    count = ranks * max(1, tokens // _rounded(capacity, multiple))
    for start in range(0, len(rows), count):
        part = order[start : start + count]
        length = _rounded(sizes[part[0]], multiple)
        padded = -(-len(part) // ranks) * ranks
        yield _filled(requests, [[groups[unit] for unit in rows[row]] for row in part], padded, length)


def _groups(requests: Sequence[Request], share: bool) -> list[list[int]]:
    """Return the indices of requests in groups that share a context; a request that shares none is a group of its own.

    A group of several requests has at most `ROW_TOKENS` positions, or twice the tokens of its context if that is more.
    """
    groups: list[list[int]] = []
    latest: dict[tuple[int, ...], int] = {}
    sizes: list[int] = []
    for index, (context, continuation) in enumerate(requests):
        group = latest.get(context) if share and len(context) > MIN_SHARED else None
        if group is not None and sizes[group] + len(continuation) <= max(ROW_TOKENS, 2 * len(context)):
            groups[group].append(index)
            sizes[group] += len(continuation)
        else:
            latest[context] = len(groups)
            groups.append([index])
            sizes.append(len(context) + len(continuation) - 1)
    return groups


def _length(group: Sequence[Request]) -> int:
    """Return the positions of requests that share a context."""
    return len(group[0].context) - 1 + sum(len(request.continuation) for request in group)


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _filled(
    requests: Sequence[Request], rows: Sequence[Sequence[Sequence[int]]], count: int, length: int
) -> PackedBatch:
    """Return a batch of `count` rows of `length` positions.

    rows: for each row, its groups of request indices. Padding follows after these groups and after these rows.
    """
    columns = padding_rows(count, length)
    spans: list[Span] = []
    for row, groups in enumerate(rows):
        start, document = 0, 0
        for group in groups:
            # The last token of a context has a different label for each request: each branch begins with a copy of it.
            context = requests[group[0]].context
            shared = len(context) - 1
            columns["input_ids"][row, start : start + shared] = context[:-1]
            columns["position_ids"][row, start : start + shared] = range(shared)
            columns["document_ids"][row, start : start + shared] = document
            start += shared
            for index in group:
                # A branch has an id of its own; a single request has one id with its context.
                document += len(group) > 1
                continuation = requests[index].continuation
                stop = start + len(continuation)
                columns["input_ids"][row, start:stop] = (context[-1], *continuation[:-1])
                columns["labels"][row, start:stop] = continuation
                columns["position_ids"][row, start:stop] = range(shared, shared + len(continuation))
                columns["document_ids"][row, start:stop] = document
                spans.append(Span(index, row, start, stop))
                start = stop
            document += 1
        columns["position_ids"][row, start:] = range(length - start)
        columns["document_ids"][row, start:] = document
    return PackedBatch(columns, spans)
