"""`--json`: print one JSON object on standard output, and all other output on standard error."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from kumi.safe_output import safe_stream

WriteJson = Callable[[Any], None]


@contextmanager
def json_output(enabled: bool) -> Iterator[WriteJson]:
    """Yield a function that prints a value as JSON on standard output.

    If `enabled`, redirect standard output to standard error meanwhile, for this process, for the ranks and workers that
    it starts, and for libraries that write to the descriptor (NCCL does), so that nothing mixes with the JSON.
    """
    if not enabled:
        yield lambda value: _write(sys.stdout, value)
        return
    stdout = sys.stdout
    if not _is_descriptor_1(stdout):
        with redirect_stdout(sys.stderr):
            yield lambda value: _write(stdout, value)
        return
    stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield lambda value: _write(safe_stream(saved, stdout.encoding), value)
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (io.UnsupportedOperation, AttributeError, ValueError):  # captured, or closed
        return False


def _write(stream: TextIO, value: Any) -> None:
    print(json.dumps(value, indent=2), file=stream, flush=True)
