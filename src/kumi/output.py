"""Standard output and error that cannot end the program."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _Kept(io.FileIO):
    """Standard output or error whose reader may leave, as in `kumi describe | head`: what is written then is dropped.

    A run goes on without anyone who watches; its metrics are in a file. What another error kept from being written
    is said once, where that is possible.
    """

    said = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            if not self.said and self.fileno() == 1:
                self.said = True
                print(f"standard output cannot be written from here on: {error.strerror}", file=sys.stderr)
            return len(data)


def keep_output() -> None:
    """Makes sure that no output can end the program: to nobody, or in a character set without the right characters."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        present = getattr(sys, name)
        if present is None:  # closed by whoever started this; opened files must not take the number
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            if nowhere != descriptor:
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
        setattr(sys, name, resilient(descriptor, getattr(present, "encoding", "utf-8")))


def resilient(descriptor: int, encoding: str) -> io.TextIOWrapper:
    """Return a text stream over `descriptor`, which it does not close, that raises no error whoever reads it."""
    raw = _Kept(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True, write_through=True
    )
