"""How far a long copy is, on standard error: a bar on a terminal, a line now and then elsewhere, nothing if quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kumi.units import format_bytes, format_seconds

Update = Callable[[int], None]
_PATIENCE, _LINE_EVERY = 2.0, 10.0


@contextmanager
def showing(title: str, total: int) -> Iterator[Update]:
    """A function update(bytes done). Nothing appears in the first two seconds."""
    with ExitStack() as stack:
        yield _bar(title, total, stack) if sys.stderr.isatty() else _lines(title, total)


def _bar(title: str, total: int, stack: ExitStack) -> Update:
    due = time.monotonic() + _PATIENCE
    shown: list[tuple[Any, Any]] = []

    def update(done: int) -> None:
        if not shown:
            if time.monotonic() < due:
                return
            shown.append(_start_bar(title, total, stack))
        bar, task = shown[0]
        bar.update(task, completed=done)

    return update


def _start_bar(title: str, total: int, stack: ExitStack) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = stack.enter_context(Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)))
    return bar, bar.add_task(title, total=total)


def _lines(title: str, total: int) -> Update:
    begun = time.monotonic()
    due = [begun + _PATIENCE]

    def update(done: int) -> None:
        now = time.monotonic()
        if now < due[0]:
            return
        due[0] = now + _LINE_EVERY
        left = format_seconds((now - begun) * (total - done) / max(done, 1))
        print(f"{title} | {format_bytes(done)} of {format_bytes(total)} | eta {left}", file=sys.stderr, flush=True)

    return update
