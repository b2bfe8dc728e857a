"""How far a long job is, on standard error: a bar on a terminal, a line now and then elsewhere, nothing if it is
quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kumi.units import format_bytes, format_count, format_seconds

Update = Callable[[int, int], None]
_PATIENCE, _LINE_EVERY = 2.0, 10.0


@contextmanager
def showing(title: str, total: int, *, enabled: bool) -> Iterator[Update]:
    """A function update(bytes done, tokens so far). Nothing appears in the first two seconds."""
    if not enabled:
        yield lambda done, tokens: None
    elif sys.stderr.isatty():
        with ExitStack() as stack:
            yield _bar(title, total, stack)
    else:
        yield _lines(title, total)


def _bar(title: str, total: int, stack: ExitStack) -> Update:
    begun = time.monotonic()
    shown: list[tuple[Any, Any]] = []

    def update(done: int, tokens: int) -> None:
        passed = time.monotonic() - begun
        if passed < _PATIENCE:
            return
        if not shown:
            shown.append(_start_bar(title, total, stack))
        bar, task = shown[0]
        bar.update(task, completed=done, note=f"{format_count(tokens)} tokens, {format_count(tokens / passed)}/s")

    return update


def _start_bar(title: str, total: int, stack: ExitStack) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[note]}"),
    )
    bar = stack.enter_context(Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)))
    return bar, bar.add_task(title, total=total, note="")


def _lines(title: str, total: int) -> Update:
    begun = time.monotonic()
    due = [begun + _PATIENCE]

    def update(done: int, tokens: int) -> None:
        now = time.monotonic()
        if now < due[0]:
            return
        due[0] = now + _LINE_EVERY
        left = format_seconds((now - begun) * (total - done) / max(done, 1))
        share = f"{format_bytes(done)} of {format_bytes(total)}"
        rate = format_count(tokens / (now - begun))
        print(
            f"{title} | {share} | {format_count(tokens)} tokens | {rate} tok/s | eta {left}",
            file=sys.stderr,
            flush=True,
        )

    return update
