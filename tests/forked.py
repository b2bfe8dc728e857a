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
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_forked(function: Callable[..., object], *args: Any, timeout: float = 300.0) -> tuple[int, str, str]:
    """Return the exit code of a child that runs `function(*args)`, and its standard output and standard error.

    The exit code is that of a SystemExit, 1 after any other exception, negative after a signal. Raise TimeoutError
    if the child has not ended after `timeout` seconds; it is killed then, with its own children.
    """
    with tempfile.TemporaryDirectory(prefix="kumi-forked-") as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        child = os.fork()
        if not child:
            _run(function, args, files)
        until = time.monotonic() + timeout
        try:
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"{function} has not ended after {timeout:.0f} s: {files[1].read_text()[-3000:]}"
                    )
                time.sleep(0.02)
        except BaseException:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        stdout, stderr = (file.read_text() for file in files)
    return os.waitstatus_to_exitcode(ended[1]), stdout, stderr


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
