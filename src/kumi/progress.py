"""Show the progress of a long job on standard error: a bar on a terminal, elsewhere a line every 10 s.

Jobs shorter than 2 s show nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Protocol

from kumi.units import format_bytes, format_seconds

# Seconds before progress is first shown, and seconds between lines.
PATIENCE, LINE_EVERY = 2.0, 10.0

Format = Callable[[float], str]  # from an amount to its text


class Update(Protocol):
    """A function that shows the amount `done` so far and a `note`."""

    def __call__(self, done: float, note: str = "") -> None: ...


@contextmanager
def show_progress(title: str, total: float, size: Format = format_bytes, *, enabled: bool = True) -> Iterator[Update]:
    """Yield a function update(done, note) that shows how much of `total` is done; `size` formats an amount."""
    if not enabled:
        yield lambda done, note="": None
    elif sys.stderr.isatty():
        with _bar(title, total, size) as update:
            yield update
    else:
        yield _lines(title, total, size)


@contextmanager
def _bar(title: str, total: float, size: Format) -> Iterator[Update]:
    """Yield an update function for a rich progress bar, which is erased at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    texts = [
        TextColumn("{task.fields[state]}", markup=False),
        *([TransferSpeedColumn()] if size is format_bytes else []),
    ]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *texts, TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, delayed_start = bar.add_task(title, total=total, state=""), Timer(PATIENCE, bar.start)
    delayed_start.daemon = True
    delayed_start.start()
    try:
        yield lambda done, note="": bar.update(task, completed=done, state=_state(done, total, size, note))
    finally:
        delayed_start.cancel()
        delayed_start.join()
        if bar.live.is_started:
            bar.stop()


def _lines(title: str, total: float, size: Format) -> Update:
    """Return an update function that prints a line with the remaining time."""
    started = time.monotonic()
    due = started + PATIENCE

    def update(done: float, note: str = "") -> None:
        nonlocal due
        now = time.monotonic()
        if now < due or done >= total:
            return
        due = now + LINE_EVERY
        eta = format_seconds((now - started) * (total - done) / done) if done else "..."
        print(f"{title} | {_state(done, total, size, note)} | eta {eta}", file=sys.stderr, flush=True)

    return update


def _state(done: float, total: float, size: Format, note: str) -> str:
    return f"{size(done)} of {size(total)}" + (f" | {note}" if note else "")
