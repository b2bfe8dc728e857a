"""Run code that changes the whole process, such as other packages' imports, in a forked child of the test process.

The child has torch imported already, which an interpreter of its own would take seconds for.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_forked(function: Callable[..., object], *args: Any, timeout: float = 300.0) -> tuple[int, str, str]:
    """Return the exit code of a child that runs `function(*args)`, and its standard output and standard error.

    The exit code is that of a SystemExit, 1 after any other exception, negative after a signal. Raise TimeoutError
    if the child has not ended after `timeout` seconds; it is killed then, with its own children.
    """
    return run_all_forked([lambda: function(*args)], timeout)[0]


def run_all_forked(functions: Sequence[Callable[[], object]], timeout: float = 300.0) -> list[tuple[int, str, str]]:
    """Run each of `functions` in a child of its own, all at the same time; return what `run_forked` does for each."""
    with tempfile.TemporaryDirectory(prefix="kumi-forked-") as folder:
        files = [
            [Path(folder, f"{name}-{number}") for name in ("stdout", "stderr")] for number in range(len(functions))
        ]
        children: dict[int, int] = {}  # process id -> number of the function
        codes: dict[int, int] = {}
        try:
            for number, function in enumerate(functions):
                child = os.fork()
                if not child:
                    _run(function, (), files[number])
                children[child] = number
            until = time.monotonic() + timeout
            while len(codes) < len(functions):
                for child, number in children.items():
                    ended = (0, 0) if number in codes else os.waitpid(child, os.WNOHANG)
                    if ended[0]:
                        codes[number] = os.waitstatus_to_exitcode(ended[1])
                if time.monotonic() > until:
                    late = next(number for number in range(len(functions)) if number not in codes)
                    raise TimeoutError(
                        f"{functions[late]} has not ended after {timeout:.0f} s: {files[late][1].read_text()[-3000:]}"
                    )
                time.sleep(0.02)
        finally:
            for child, number in children.items():
                if number not in codes:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
        return [(codes[number], *(file.read_text() for file in pair)) for number, pair in enumerate(files)]


def _run(function: Callable[..., object], args: tuple[Any, ...], files: list[Path]) -> None:
    code = 1
    try:
        os.setsid()
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        warnings.resetwarnings()  # pytest makes errors of them
        warnings.simplefilter("ignore")
        function(*args)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
