"""How far a long job is, on standard error: a bar on a terminal, a line now and then elsewhere, nothing if it is
quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Protocol

from kumi.units import format_bytes, format_seconds

# Seconds that a job may take before it shows how far it is, and from one line to the next.
PATIENCE, LINE_EVERY = 2.0, 10.0

Size = Callable[[float], str]


class Update(Protocol):
    """Says how much is done, and what else there is to know."""

    def __call__(self, done: float, note: str = "") -> None: ...


@contextmanager
def showing(title: str, total: float, size: Size = format_bytes, *, enabled: bool = True) -> Iterator[Update]:
    """Yield a function update(done, note) that shows how much of `total` is done. `size` writes an amount."""
    if not enabled:
        yield lambda done, note="": None
    elif sys.stderr.isatty():
        with _bar(title, total, size) as update:
            yield update
    else:
        yield _lines(title, total, size)


@contextmanager
def _bar(title: str, total: float, size: Size) -> Iterator[Update]:
    """A bar that leaves nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    texts = [
        TextColumn("{task.fields[state]}", markup=False),
        *([TransferSpeedColumn()] if size is format_bytes else []),
    ]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *texts, TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, later = bar.add_task(title, total=total, state=""), Timer(PATIENCE, bar.start)
    later.daemon = True
    later.start()
    try:
        yield lambda done, note="": bar.update(task, completed=done, state=_state(done, total, size, note))
    finally:
        later.cancel()
        later.join()
        if bar.live.is_started:
            bar.stop()


def _lines(title: str, total: float, size: Size) -> Update:
    begun = time.monotonic()
    due = begun + PATIENCE

    def update(done: float, note: str = "") -> None:
        nonlocal due
        now = time.monotonic()
        if now < due or done >= total:
            return
        due = now + LINE_EVERY
        left = format_seconds((now - begun) * (total - done) / done) if done else "..."
        print(f"{title} | {_state(done, total, size, note)} | eta {left}", file=sys.stderr, flush=True)

    return update


def _state(done: float, total: float, size: Size, note: str) -> str:
    return f"{size(done)} of {size(total)}" + (f" | {note}" if note else "")
