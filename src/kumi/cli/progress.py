"""A progress bar for searches that take their time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

# Seconds that a search may take before it shows how far it is.
PATIENCE = 2.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None] | None]:
    """A bar on standard error that shows after `PATIENCE` and leaves nothing behind; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, later = bar.add_task(what, total=1.0), Timer(PATIENCE, bar.start)
    later.daemon = True
    later.start()
    try:
        yield lambda done: bar.update(task, completed=done)
    finally:
        later.cancel()
        later.join()
        if bar.live.is_started:
            bar.stop()
