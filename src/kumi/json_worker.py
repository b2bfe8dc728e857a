"""A worker process: `python -m module`, which reads jobs from its standard input and answers on its standard output.

Jobs and answers are JSON, one on each line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class JsonWorker:
    """A running worker. `environment` is added to that of this process; the worker inherits `descriptors`."""

    def __init__(
        self, module: str, environment: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
    ) -> None:
        root = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # One thread per worker; the processes run in parallel.
        threads = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
        # A separate process group: Ctrl-C in the terminal reaches only the parent, which stops its workers.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **threads, **(environment or {})},
            pass_fds=descriptors,
            process_group=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._jobs, self._answers = self._process.stdin, self._process.stdout
        self._rest = b""  # the beginning of a line that is not complete yet

    @property
    def pid(self) -> int:
        """The number of the process, and of its process group."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` has an answer, or the worker has ended."""
        return self._answers.fileno()

    def send(self, job: Mapping[str, Any]) -> None:
        """Send `job`. If the worker is dead the job is dropped, and `read` returns None."""
        with suppress(BrokenPipeError):
            self._jobs.write(json.dumps(job).encode() + b"\n")
            self._jobs.flush()

    def read(self) -> list[Answer] | None:
        """Read available output; return its complete answers, or None when the worker has ended.

        Raise ValueError if a line is not JSON.
        """
        block = os.read(self.fileno(), 1 << 16)
        if not block:
            return None
        *lines, self._rest = (self._rest + block).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self) -> int:
        """Wait for the end of the worker; return its exit code, or the negative number of the signal that ended it."""
        return self._process.wait()

    def stop(self) -> None:
        """Kill the worker and the processes of its group, and close its pipes."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()
        with suppress(BrokenPipeError):  # unsent bytes are dropped
            self._jobs.close()


def fate(code: int) -> str:
    """Return how a process ended that has the exit code `code`, as a phrase: "exited with code 1"."""
    if code < 0:
        return f"was killed by signal {-code} (9 is often the system running out of memory)"
    return f"exited with code {code}"
