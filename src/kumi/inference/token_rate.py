"""Progress of a generation: replies that have ended, and tokens a second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kumi.progress import Update, show_progress

# Seconds between updates of the shown rate.
_EVERY = 0.25


class TokenRate:
    """Counts tokens and replies, and shows them with `update`."""

    def __init__(self, update: Update) -> None:
        self._update, self._started, self._shown = update, time.monotonic(), 0.0
        self._tokens, self._replies = 0, 0

    def on_token(self, prompt: int, sample: int, ids: Sequence[int]) -> None:
        """Count a token."""
        self._tokens += 1
        now = time.monotonic()
        if now - self._shown >= _EVERY:
            self._shown = now
            self._update(self._replies, f"{self._tokens / max(now - self._started, 1e-9):.0f} tokens/s")

    def on_reply(self) -> None:
        """Count a reply that has ended."""
        self._replies += 1


@contextmanager
def show_rate(title: str, replies: int) -> Iterator[TokenRate]:
    """Yield a counter that shows how many of `replies` have ended, on standard error."""
    with show_progress(title, replies, lambda count: f"{count:.0f}") as update:
        yield TokenRate(update)
