"""Make standard output and standard error safe: a failing write never ends the program."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _SafeStream(io.FileIO):
    """Raw stream that drops output which cannot be written, so that a run continues; its metrics are in a file.

    After the reader has closed the pipe, as in `kumi describe | head`, output is dropped silently. Any other write
    error (disk full, ...) also drops the output; for standard output, one warning goes to standard error.
    """

    warned = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            if not self.warned and self.fileno() == 1:
                self.warned = True
                print(f"standard output cannot be written from here on: {error.strerror}", file=sys.stderr)
            return len(data)


def make_output_safe() -> None:
    """Replace sys.stdout and sys.stderr by streams that raise no error on a write.

    They survive a closed pipe, a closed descriptor, and characters outside the terminal's encoding.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent; without /dev/null the next opened file would get its descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            if null != descriptor:
                os.close(null)
            os.set_inheritable(descriptor, True)
        setattr(sys, name, safe_stream(descriptor, getattr(stream, "encoding", "utf-8")))


def safe_stream(descriptor: int, encoding: str) -> io.TextIOWrapper:
    """Return a text stream over `descriptor` that raises no error on a write, and does not close the descriptor."""
    raw = _SafeStream(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True, write_through=True
    )
