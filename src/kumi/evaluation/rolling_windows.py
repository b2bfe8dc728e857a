"""Windows over the tokens of a document that is longer than the model's context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kumi.evaluation.score_requests import Request


def rolling_windows(ids: Sequence[int], prefix: int, max_length: int, stride: int) -> Iterator[Request]:
    """Yield requests that score each token of `ids` once, each reading at most `max_length` tokens.

    The first window scores up to `max_length` tokens, after the token `prefix` alone. Every further window scores the
    next `stride` tokens or the rest, with as many tokens before them as it can read: at least max_length - stride + 1.
    """
    assert 1 <= stride <= max_length, f"a stride of {stride} for windows of {max_length}"
    scored = min(max_length, len(ids))
    if scored:
        yield Request((prefix,), tuple(ids[:scored]))
    while scored < len(ids):
        end = min(scored + stride, len(ids))
        yield Request(tuple(ids[end - max_length - 1 : scored]), tuple(ids[scored:end]))
        scored = end
