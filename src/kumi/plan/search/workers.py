"""Workers of a search: threads for a small one, processes for a large one.

Threads wait for each other wherever Python itself works, which keeps all but one or two processors idle. A worker
process is an interpreter of its own, started and never forked: that is safe whatever threads, devices and `__main__`
the calling process has.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kumi.errors import KumiError
from kumi.process_limits import free_memory

# Layouts, legal or not, that a search must have for each worker process: so many take a second or more, and the process
# starts in less than half a second.
ROWS_PER_PROCESS = 1_000_000

_MOST_PROCESSES = 64

# Memory that a worker takes at most, measured on the cases of benchmarks/planner_speed.py: 230 MB for dense models,
# 416 MB for experts. Workers together take at most half of the memory that is free.
_WORKER_BYTES = 416_000_000

Submit = Callable[..., Future[Any]]


@contextmanager
def start_workers(task: Callable[..., Any], workers: int, rows: int) -> Iterator[tuple[Submit, int]]:
    """Yield a function that calls `task` with its arguments in a worker, and the number of workers.

    `workers`: the most workers; there are fewer where memory is short.
    `rows`: the number of layouts, which decides between threads and processes.

    A result raises the error that its task raised, or KumiError where a worker process died. Leaving the context ends
    the processes at once.
    """
    free = free_memory()
    if free is not None:
        workers = min(workers, free // 2 // _WORKER_BYTES)
    processes = min(workers, rows // ROWS_PER_PROCESS, _MOST_PROCESSES)
    if processes < 2 or not sys.executable:
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            yield lambda *arguments: pool.submit(task, *arguments), max(1, workers)
        return
    idle = SimpleQueue[subprocess.Popen[bytes]]()
    # A thread for each process passes on tasks and results. On leaving, `stack` ends the processes, the pool's threads
    # end, and then `pipes` closes the pipes.
    with ExitStack() as pipes, ThreadPoolExecutor(max_workers=processes) as pool, ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for _ in range(processes):
            process = _start_process()
            pipes.callback(_close, process)
            stack.callback(_stop, process)
            idle.put(process)
        pickled_task = pickle.dumps(task)
        started = set[int]()

        def ask(*arguments: Any) -> Any:
            """Return the task's result from a process that is idle; its first request also brings it the task."""
            process = idle.get()
            try:
                is_first = process.pid not in started
                started.add(process.pid)
                return _ask(process, (pickled_task if is_first else b"") + pickle.dumps(arguments))
            finally:
                idle.put(process)

        yield lambda *arguments: pool.submit(ask, *arguments), processes


def _start_process() -> subprocess.Popen[bytes]:
    """Start a worker process that imports kumi from the same folder as this process."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread per worker; the processes run in parallel.
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    # A separate process group: Ctrl-C in the terminal reaches only the parent, which ends its workers.
    return subprocess.Popen(
        [sys.executable, "-m", "kumi.plan.search.worker_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        process_group=0,
    )


def _ask(process: subprocess.Popen[bytes], request: bytes) -> Any:
    """Send `request` to a worker process and return the task's result.

    Raise the error that the task raised, or KumiError if the process died.
    """
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(request)
        process.stdin.flush()
        result, error = pickle.load(process.stdout)
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):
        raise KumiError(f"a worker process of the search {_fate(process.wait())}; run the same command again") from None
    if error is not None:
        raise error
    return result


def _fate(code: int) -> str:
    """Return the words for the exit `code` of a process: a negative code is the signal that ended it."""
    if code < 0:
        return f"was killed by signal {-code} (9 is often the system running out of memory)"
    return f"exited with code {code}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a worker process, whatever it does; the thread that waits for its answer then ends, too."""
    process.kill()
    process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes of an ended process, which no thread uses any more."""
    assert process.stdin
    assert process.stdout
    process.stdout.close()
    try:
        process.stdin.close()
    except BrokenPipeError:
        return  # unsent bytes are dropped
