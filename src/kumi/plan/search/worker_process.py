"""Worker process of a search, started by `kumi.plan.search.workers`: calls one function with the arguments it reads.

Standard input has the pickled function, then a pickled tuple of arguments for each call; each call is answered on
standard output with a pickled (result, error). All input is the parent's, so unpickling it is safe.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any


def _main() -> None:
    """Answer calls until standard input ends. What the function prints goes to standard error."""
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    sys.stdout = sys.stderr
    try:
        call = pickle.load(tasks)
        while True:
            arguments = pickle.load(tasks)
            answers.write(pickle.dumps(_answer(call, arguments)))
            answers.flush()
    except (EOFError, BrokenPipeError):
        return  # the parent has ended


def _answer(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Return (result, None) of a call, or (None, the error) if it raises one."""
    try:
        return call(*arguments), None
    except Exception as error:
        return None, error


if __name__ == "__main__":
    _main()
